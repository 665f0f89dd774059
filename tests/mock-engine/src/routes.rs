//! The synthetic model: tokens, router, and the routed experts of an answer.

use semmoe_engines::Engine as Kind;
use semmoe_engines::recording::encode_npy;
use semmoe_engines::sglang::encode_routed_experts;
use semmoe_tables::ModelInfo;

use crate::answer::Run;
use crate::engine::Engine;
use crate::fault::Fault;

/// The synthetic router: neighbours on a ring, starting where token and layer determine.
pub fn experts(token: u32, layer: u16, model: &ModelInfo) -> Vec<u16> {
    let mixed = (u64::from(token) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(u64::from(layer) << 40);
    let first = (mixed >> 33) % u64::from(model.num_experts);
    (0..u64::from(model.top_k)).map(|i| ((first + i) % u64::from(model.num_experts)) as u16).collect()
}

/// The tokens generated after a prompt.
pub fn generated(prompt: &[u32], max_tokens: u32, vocab_size: u32) -> Vec<u32> {
    let sum: u32 = prompt.iter().fold(0, |sum, id| sum.wrapping_mul(31).wrapping_add(*id));
    (0..max_tokens).map(|i| sum.wrapping_add(i * 7) % vocab_size.min(200)).collect()
}

/// Rows of all layers in the engine's encoding.
pub(crate) fn encoded(engine: &Engine, run: &Run) -> Option<String> {
    let settings = engine.settings().clone();
    match run.fault {
        _ if !settings.gives_routes => return None,
        Some(Fault::NoRoutes) => return None,
        Some(Fault::NotBase64) => return Some("!!!!".to_owned()),
        Some(Fault::Malformed) => return Some("AAAA".to_owned()),
        _ => {}
    }
    let model = &engine.model;
    let (k, hidden) = (usize::from(model.top_k), usize::from(model.num_hidden_layers));
    let mut tokens = [&run.prompt[..], &run.output[..run.output.len().saturating_sub(1)]].concat();
    match run.fault {
        Some(Fault::FewerRows) => tokens.truncate(tokens.len() - 1),
        Some(Fault::MoreRows) => tokens.push(1),
        Some(Fault::AllAlike) => tokens.fill(1),
        _ => {}
    }
    let unsteady = if engine.has_run_before() { settings.unsteady_tokens } else { 0 };
    let mut ids = Vec::new();
    for (position, token) in tokens.iter().enumerate() {
        let shift = if position < unsteady { model.top_k } else { 0 };
        for layer in 0..model.num_hidden_layers {
            match &run.fault {
                Some(Fault::Local(experts)) => ids.extend(local(engine, run.rank, experts.parse().unwrap())),
                _ => ids.extend(row(engine, *token, layer, shift)),
            }
        }
    }
    let first = usize::from(model.layer_ids[0]) * k;
    match run.fault {
        Some(Fault::ForeignExpert) => ids[first] = i32::from(model.num_experts),
        Some(Fault::SameExpertTwice) => ids[first] = ids[first + 1],
        Some(Fault::NoExpert) => ids[first] = -1,
        _ => {}
    }
    let wrong_shape = run.fault == Some(Fault::WrongShape);
    let shape = if wrong_shape { [tokens.len(), k, hidden] } else { [tokens.len(), hidden, k] };
    let mut text = if engine.dialect.is_vllm() {
        let ids: Vec<u16> = ids.iter().map(|id| *id as u16).collect();
        encode_npy(&shape, &ids, model.num_experts > 256)
    } else {
        encode_routed_experts(&ids)
    };
    if run.fault == Some(Fault::Truncated) {
        text.truncate(text.len() - 5);
    }
    Some(text)
}

/// `count` experts of a rank, and the others from the next one.
fn local(engine: &Engine, rank: u16, count: u16) -> impl Iterator<Item = i32> {
    let (experts, ranks) = (engine.model.num_experts, engine.settings().ranks);
    let each = experts / ranks;
    let (own, other) = (each * rank, each * (rank + 1) % experts);
    (0..engine.model.top_k).map(move |slot| i32::from(slot + if slot < count { own } else { other }))
}

/// For dense layers the buffers of SGLang and vLLM hold zeros, the worker's no experts.
fn row(engine: &Engine, token: u32, layer: u16, shift: u16) -> Vec<i32> {
    let model = &engine.model;
    if !model.layer_ids.contains(&layer) {
        let none = if engine.dialect.engine == Kind::Semmoe { -1 } else { 0 };
        return vec![none; usize::from(model.top_k)];
    }
    experts(token, layer, model).into_iter().map(|expert| i32::from((expert + shift) % model.num_experts)).collect()
}
