//! Engines' answers that are inspected and cut.

use semmoe_engines::pieces::{prompt_tokens, rank_in_meta};
use semmoe_engines::routed::{Place, cut};
use serde_json::Value;

/// serde_json treats an object that begins with this key specially, so it cannot serve as the reference.
const MAGIC: &[u8] = b"$serde_json::private";

/// A parsable answer still parses without its routed experts and has lost nothing else; other bytes do no harm.
pub fn answers(data: &[u8]) {
    let _ = rank_in_meta(data);
    let _ = prompt_tokens(data);
    for place in [Place::MetaInfo, Place::Sglext, Place::Choices { ids: false }, Place::Choices { ids: true }] {
        let Ok(Some(found)) = cut(place, data) else { continue };
        // For vLLM `null` replaces the value, which may be longer.
        assert!(found.rest.len() < data.len() || matches!(place, Place::Choices { .. }));
        if data.windows(MAGIC.len()).any(|window| window == MAGIC) {
            continue;
        }
        let Ok(before) = serde_json::from_slice::<Value>(data) else { continue };
        let after: Value =
            serde_json::from_slice(&found.rest).unwrap_or_else(|error| panic!("broken by cutting: {error}"));
        assert_eq!(without_experts(before), without_experts(after));
    }
}

/// Removes the experts and the members that contained nothing else.
fn without_experts(value: Value) -> Value {
    match value {
        Value::Array(items) => items.into_iter().map(without_experts).collect(),
        Value::Object(members) => {
            let kept = members.into_iter().filter(|(key, _)| {
                !matches!(key.as_str(), "routed_experts" | "sglext" | "token_ids" | "prompt_token_ids")
            });
            Value::Object(kept.map(|(key, value)| (key, without_experts(value))).collect())
        }
        other => other,
    }
}
