//! The bundled model, its golden vectors, and several ranks as threads.
#![allow(dead_code, reason = "each test file uses a part")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::SafeTensors;
use semmoe_tables::Placement;
use semmoe_worker::ep::{Counters, CountersSnapshot, ExpertParallel, LocalTransport, StepPhase, Transport};
use semmoe_worker::model::{KvCache, Model, ModelConfig, StepItem};
use serde_json::Value;

pub(crate) fn model_dir() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/tiny-qwen3moe-15m")).to_path_buf()
}

pub(crate) fn config() -> ModelConfig {
    ModelConfig::load(&model_dir()).unwrap()
}

/// What Transformers computed for one prompt.
pub(crate) struct Golden {
    pub(crate) ids: Vec<u32>,
    /// `[L][position][k]`
    pub(crate) experts: Vec<Vec<Vec<u16>>>,
    pub(crate) greedy: Vec<u32>,
    /// `[V]`
    pub(crate) last_logits: Vec<f32>,
    /// `[L, positions, N]`
    pub(crate) router_logits: Vec<f32>,
    /// `[layers + 1, H]`
    pub(crate) hidden: Vec<f32>,
}

pub(crate) fn golden() -> Vec<Golden> {
    let dir = model_dir().join("golden");
    let json: Value = serde_json::from_slice(&std::fs::read(dir.join("golden.json")).unwrap()).unwrap();
    let bytes = std::fs::read(dir.join("golden.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |prompt: usize, name: &str| -> Vec<f32> {
        let view = tensors.tensor(&format!("{prompt}.{name}")).unwrap();
        view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let prompts = json["prompts"].as_array().unwrap();
    let golden = |(i, prompt): (usize, &Value)| {
        let field = |name: &str| prompt[name].clone();
        Golden {
            ids: serde_json::from_value(field("input_ids")).unwrap(),
            experts: serde_json::from_value(field("router_topk_ids")).unwrap(),
            greedy: serde_json::from_value(field("greedy_16")).unwrap(),
            last_logits: tensor(i, "logits_last"),
            router_logits: tensor(i, "router_logits"),
            hidden: tensor(i, "hidden_last_position"),
        }
    };
    prompts.iter().enumerate().map(golden).collect()
}

/// The largest difference, as a part of the largest expected magnitude.
pub(crate) fn relative_error(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(0.0f32, |a, b| a.max(b.abs()));
    found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / scale
}

pub(crate) fn argmax(logits: &[f32]) -> u32 {
    let best = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
    (0..logits.len()).fold(0, best) as u32
}

/// Contiguous halves, quarters and so on.
pub(crate) fn contiguous(world: u16) -> Placement {
    let config = config();
    Placement::contiguous(config.num_moe_layers(), config.num_experts as u16, world).unwrap()
}

/// Equally many experts for each rank, by chance.
pub(crate) fn shuffled(world: u16, seed: u64) -> Placement {
    let config = config();
    let mut random = fastrand::Rng::with_seed(seed);
    let layer = |_| {
        let mut groups: Vec<u16> = (0..config.num_experts as u16).map(|expert| expert % world).collect();
        random.shuffle(&mut groups);
        groups
    };
    Placement::new(world, (0..config.num_moe_layers()).map(layer).collect()).unwrap()
}

/// One rank with its model.
pub(crate) struct Rank {
    pub(crate) rank: usize,
    pub(crate) model: Model,
    pub(crate) ep: ExpertParallel,
}

impl Rank {
    pub(crate) fn new(transport: Box<dyn Transport>, placement: &Placement) -> Self {
        let rank = transport.rank();
        let counters = Arc::new(Counters::new(placement.layers()));
        let model = Model::load(&model_dir(), rank, placement).unwrap();
        let ep = ExpertParallel::new(transport, placement, counters).unwrap();
        Self { rank: rank.index(), model, ep }
    }

    pub(crate) fn alone() -> Self {
        Self::new(Box::new(LocalTransport::mesh(1).remove(0)), &contiguous(1))
    }

    pub(crate) fn counted(&self) -> CountersSnapshot {
        self.ep.counters().snapshot()
    }

    /// One prompt from an empty cache: logits after its last token, its routes, its cache.
    pub(crate) fn prefill(&mut self, tokens: &[u32]) -> (Vec<f32>, Vec<u16>, KvCache) {
        let mut kv = self.model.new_sequence();
        let mut items = [StepItem { kv: &mut kv, tokens, want_logits: true, phase: StepPhase::Prefill }];
        let out = self.model.step(&mut items, &mut self.ep).unwrap();
        let (logits, routes) = (out.logits(0).unwrap().to_vec(), out.routes(0).to_vec());
        (logits, routes, kv)
    }

    /// Continues all prompts together, greedily, in exactly `new_tokens` steps.
    pub(crate) fn greedy(&mut self, prompts: &[&[u32]], new_tokens: usize) -> Vec<Vec<u32>> {
        let mut kvs: Vec<KvCache> = prompts.iter().map(|_| self.model.new_sequence()).collect();
        let mut texts = vec![Vec::new(); prompts.len()];
        for step in 0..new_tokens {
            let phase = if step == 0 { StepPhase::Prefill } else { StepPhase::Decode };
            let parts = kvs.iter_mut().zip(prompts).zip(&texts);
            let mut items: Vec<StepItem<'_>> = parts
                .map(|((kv, prompt), text): (_, &Vec<u32>)| {
                    let tokens = if step == 0 { *prompt } else { &text[step - 1..] };
                    StepItem { kv, tokens, want_logits: true, phase }
                })
                .collect();
            let out = self.model.step(&mut items, &mut self.ep).unwrap();
            let next: Vec<u32> = (0..prompts.len()).map(|i| argmax(out.logits(i).unwrap())).collect();
            texts.iter_mut().zip(next).for_each(|(text, token)| text.push(token));
        }
        texts
    }
}

/// Runs every rank of a unit in a thread of its own, over the given transports, and returns their results in rank order.
pub(crate) fn on_ranks<T: Send>(
    transports: Vec<Box<dyn Transport>>,
    placement: &Placement,
    work: impl Fn(Rank) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let start = |transport| scope.spawn(move || work(Rank::new(transport, placement)));
        let threads: Vec<_> = transports.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub(crate) fn local_mesh(world: u16) -> Vec<Box<dyn Transport>> {
    LocalTransport::mesh(usize::from(world)).into_iter().map(|t| Box::new(t) as Box<dyn Transport>).collect()
}
