//! Pins spliced into bodies.

use bytes::Bytes;
use http::HeaderMap;
use semmoe_engines::fields::removed_names;
use semmoe_engines::pin::{Stripped, apply, client_pin};
use semmoe_engines::{Dialect, Engine, Route};
use semmoe_tables::RankId;
use serde_json::Value;

use crate::Ordered;

const RANK: u16 = 3;

/// A body that a JSON parser accepts as an object is accepted, and keeps its members except the clients' pins, with
/// ours first. Any other body is refused or spliced without a panic.
pub fn splice(data: &[u8]) {
    let body = Bytes::copy_from_slice(data);
    let parsed: Option<Ordered> = serde_json::from_slice(data).ok();
    for engine in [Engine::Sglang, Engine::Vllm, Engine::Semmoe, Engine::Openai] {
        for route in [Route::Generate, Route::Chat] {
            let _ = client_pin(engine, route, &HeaderMap::new(), data);
        }
    }
    let stripped = match (Stripped::new(&body), &parsed) {
        (Ok(stripped), _) => stripped,
        (Err(error), Some(_)) => panic!("the parser takes what the scanner refuses: {error}"),
        (Err(_), None) => return,
    };
    let dialect = Dialect::of(Engine::Semmoe, None);
    let pinned = apply(&dialect, Route::Generate, RankId::new(RANK), &mut HeaderMap::new(), &stripped);
    let pinned = pinned.unwrap_or_else(|error| panic!("no pin: {error}"));
    let Some(Ordered(members)) = parsed else { return };
    let kept: Vec<(String, Value)> =
        members.into_iter().filter(|(key, _)| !removed_names().any(|name| name == key)).collect();
    assert_eq!(parse(stripped.bytes()), kept);
    let spliced = parse(&pinned);
    assert_eq!(spliced[0], ("routed_dp_rank".to_owned(), Value::from(RANK)));
    assert_eq!(spliced[1..], kept);
}

fn parse(body: &[u8]) -> Vec<(String, Value)> {
    let Ordered(members) = serde_json::from_slice(body).unwrap_or_else(|error| panic!("broken by splicing: {error}"));
    members
}
