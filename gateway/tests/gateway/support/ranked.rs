//! Mock engines that run requests on their ranks, and a record of what ran there.

use std::path::Path;

use semmoe_mock_engine::{Dialect, Engine, Mock, SGLANG_0_5_23, Seen, Settings, Texts, VLLM_0_32};
use semmoe_text::ChatTemplate;
use serde_json::{Value, json};

use super::{Fixture, MODEL_DIR, tokenizer};

/// An engine of the fixture's model.
pub(crate) fn mock_of(fixture: &Fixture, dialect: Dialect, texts: Texts, change: impl FnOnce(&mut Settings)) -> Mock {
    let engine = Engine::new(dialect, fixture.model.clone(), texts);
    Mock::start(engine.with(|settings| settings.ranks = fixture.ranks).with(change))
}

/// A mock of the fixture with the gateway's tokens and template; otherwise its counts would be misread.
pub(crate) fn ranked(fixture: &Fixture, dialect: Dialect, change: impl FnOnce(&mut Settings)) -> Mock {
    let template = ChatTemplate::beside(&Path::new(MODEL_DIR).join("tokenizer.json"), || 0).unwrap();
    let texts = Texts::Model(tokenizer(), Some(Box::new(template)));
    mock_of(fixture, dialect, texts, change)
}

/// SGLang, which reports the fixture's placement.
pub(crate) fn sglang(fixture: &Fixture) -> Mock {
    let mut info = fixture.info();
    info["version"] = "0.5.23".into();
    ranked(fixture, SGLANG_0_5_23, |settings| settings.info = Some(info))
}

pub(crate) fn vllm(fixture: &Fixture) -> Mock {
    ranked(fixture, VLLM_0_32, |_| ())
}

fn is_probe(body: &Value) -> bool {
    body["prompt"] == json!([1])
        || body["input_ids"] == json!([0])
        || body["messages"][0]["content"] == "0"
        || body["input"] == "0"
}

/// The ranks that clients' requests ran on since the last call.
pub(crate) fn ran(mock: &Mock) -> Vec<u16> {
    mock.ran().iter().filter(|ran| !is_probe(&ran.body)).map(|ran| ran.rank).collect()
}

/// The pins of clients' requests since the last call, whether or not they were read.
pub(crate) fn sent_pins(mock: &mut Mock) -> Vec<Option<u64>> {
    let pin = |seen: Seen| seen.header_pin().map(u64::from).or(seen.json()["routed_dp_rank"].as_u64());
    of_clients(mock).into_iter().map(pin).collect()
}

/// The requests since the last call, without probes.
pub(crate) fn of_clients(mock: &mut Mock) -> Vec<Seen> {
    let all = std::iter::from_fn(|| mock.seen.try_recv().ok());
    all.filter(|seen| !is_probe(&seen.json())).collect()
}
