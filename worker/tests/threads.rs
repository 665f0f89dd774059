//! A step on several threads: attention and experts are shared among them, and every logit is the same, bit for bit.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;

use semmoe_tables::{Placement, RankId};
use semmoe_worker::ep::{ExpertParallel, LocalTransport, StepPhase};
use semmoe_worker::model::{KvCache, Model, ModelConfig, StepItem, with_threads};

/// The logits after prompts of different lengths, up to `longest` tokens, and after one more token of each.
fn logits(model_dir: &Path, sequences: usize, longest: usize) -> Vec<f32> {
    let config = ModelConfig::load(model_dir).unwrap();
    let placement = Placement::contiguous(config.num_moe_layers(), config.num_experts as u16, 1).unwrap();
    let mut model = Model::load(model_dir, RankId::new(0), &placement).unwrap();
    let mut ep = ExpertParallel::new(Box::new(LocalTransport::mesh(1).remove(0)), &placement).unwrap();
    let mut caches: Vec<KvCache> = (0..sequences).map(|_| model.new_sequence()).collect();
    let token = |sequence: usize, at: usize| ((31 * sequence + 7 * at + at * at) % config.vocab_size) as u32;
    let prompt = |sequence| (0..longest - 5 * sequence).map(|at| token(sequence, at)).collect();
    let prompts: Vec<Vec<u32>> = (0..sequences).map(prompt).collect();
    let next: Vec<Vec<u32>> = (0..sequences).map(|sequence| vec![token(sequence, 1)]).collect();

    let mut logits = Vec::new();
    for (tokens, phase) in [(prompts, StepPhase::Prefill), (next, StepPhase::Decode)] {
        let item = |(kv, tokens)| StepItem { kv, tokens, want_logits: true, phase };
        let tokens = tokens.iter().map(Vec::as_slice);
        let mut items: Vec<StepItem<'_>> = caches.iter_mut().zip(tokens).map(item).collect();
        let out = model.step(&mut items, &mut ep).unwrap();
        (0..sequences).for_each(|item| logits.extend_from_slice(out.logits(item).unwrap()));
    }
    logits
}

#[test]
fn logits_do_not_depend_on_the_number_of_threads() {
    let bundled = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/tiny-qwen3moe-15m"));
    let latent = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/deepseek-v3"));
    for (model_dir, sequences, longest) in [(bundled, 5, 150), (bundled, 1, 300), (latent, 10, 60)] {
        let alone = logits(model_dir, sequences, longest);
        for threads in [2, 3] {
            let shared = with_threads(threads, || logits(model_dir, sequences, longest)).unwrap();
            assert!(shared == alone, "{}: {sequences} sequences on {threads} threads", model_dir.display());
        }
    }
}
