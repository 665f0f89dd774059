//! Any value under any configuration key: it is refused in one sentence, or the model runs; nothing panics.

use std::path::Path;

use crate::common::{contiguous_of, fixture, local_mesh};
use semmoe_tables::RankId;
use semmoe_worker::ep::{ExpertParallel, StepPhase};
use semmoe_worker::model::{Model, ModelConfig, ModelError, StepItem, Wants};
use serde_json::{Value, json};

const FIXTURES: [&str; 6] = ["qwen3-moe", "qwen2-moe", "mixtral", "olmoe", "deepseek-v2-lite", "deepseek-v2"];

fn hostile() -> Vec<Value> {
    let numbers = [0u64, 1, 2, 3, 7, 1 << 16, 1 << 24, 1 << 40, u64::MAX].map(|number| json!(number));
    let others =
        [json!(null), json!(-1), json!(0.5), json!(1e308), json!(true), json!(false), json!("x"), json!([]), json!({})];
    numbers.into_iter().chain(others).collect()
}

/// Loads the model and runs two steps, as far as possible.
fn try_model(dir: &Path) -> Result<(), ModelError> {
    let config = ModelConfig::load(dir)?;
    let placement = contiguous_of(&config, 1);
    let mut model = Model::load(dir, RankId::new(0), &placement)?;
    let mut ep = ExpertParallel::new(local_mesh(1).remove(0), &placement).unwrap();
    let mut kv = model.new_sequence();
    for tokens in [&[1, 2, 0][..], &[5]] {
        if kv.remaining() < tokens.len() {
            break;
        }
        let mut items = [StepItem { kv: &mut kv, tokens, wants: Wants::Logits, phase: StepPhase::Prefill }];
        let out = model.step(&mut items, &mut ep).unwrap();
        assert_eq!(out.logits(0).unwrap().len(), config.vocab_size);
        assert!(out.routes(0).iter().all(|expert| usize::from(*expert) < config.num_experts));
    }
    Ok(())
}

#[test]
fn any_value_of_any_key_is_refused_or_runs() {
    let (mut refused, mut ran) = (0, 0);
    for name in FIXTURES {
        let copy = tempfile::tempdir().unwrap();
        let weights = fixture(name).join("model.safetensors");
        std::os::unix::fs::symlink(weights, copy.path().join("model.safetensors")).unwrap();
        let config: Value = serde_json::from_slice(&std::fs::read(fixture(name).join("config.json")).unwrap()).unwrap();
        let nested = config["rope_scaling"].as_object().into_iter().flat_map(|scaling| scaling.keys());
        let nested: Vec<[&str; 2]> = nested.map(|key| ["rope_scaling", key.as_str()]).collect();
        let keys = config.as_object().unwrap().keys().map(|key| [key.as_str(), ""]);
        for [key, below] in keys.chain(nested) {
            for value in hostile() {
                let mut changed = config.clone();
                let place = if below.is_empty() { &mut changed[key] } else { &mut changed[key][below] };
                *place = value.clone();
                std::fs::write(copy.path().join("config.json"), changed.to_string()).unwrap();
                match try_model(copy.path()) {
                    Ok(()) => ran += 1,
                    Err(error) => {
                        refused += 1;
                        let reported = error.to_string();
                        assert!(
                            !reported.contains('\n') && reported.len() < 600,
                            "{name}: {key} {below} = {value}: {reported}"
                        );
                    }
                }
            }
        }
    }
    assert!(refused > 1000 && ran > 1000, "{refused} refused, {ran} ran");
}
