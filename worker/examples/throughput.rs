//! Prefill and decode throughput of the bundled model on one rank and one thread:
//! `cargo run -p semmoe-worker --example throughput`.

use std::path::Path;
use std::time::Instant;

use semmoe_tables::{Placement, RankId};
use semmoe_worker::ep::{ExpertParallel, LocalTransport, StepPhase};
use semmoe_worker::model::{KvCache, Model, ModelConfig, StepItem};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

struct Bench {
    model: Model,
    ep: ExpertParallel,
    random: fastrand::Rng,
}

impl Bench {
    fn new(model_dir: &Path) -> Outcome<Self> {
        let config = ModelConfig::load(model_dir)?;
        let placement = Placement::contiguous(config.num_moe_layers(), config.num_experts as u16, 1)?;
        let model = Model::load(model_dir, RankId::new(0), &placement)?;
        let ep = ExpertParallel::new(Box::new(LocalTransport::mesh(1).remove(0)), &placement)?;
        Ok(Self { model, ep, random: fastrand::Rng::with_seed(1) })
    }

    fn tokens(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.random.u32(0..10_000)).collect()
    }

    /// Tokens per second of the best of several runs: `sequences` with `context` cached tokens each take `tokens` more.
    fn measure(&mut self, sequences: usize, context: usize, tokens: usize, phase: StepPhase) -> Outcome<f64> {
        let mut kvs: Vec<KvCache> = (0..sequences).map(|_| self.model.new_sequence()).collect();
        if context > 0 {
            let prompt = self.tokens(context);
            self.step(&mut kvs, &prompt, StepPhase::Prefill)?;
        }
        let mut best = f64::INFINITY;
        for _ in 0..30 {
            let next = self.tokens(tokens);
            let start = Instant::now();
            self.step(&mut kvs, &next, phase)?;
            best = best.min(start.elapsed().as_secs_f64());
            kvs.iter_mut().for_each(|kv| kv.truncate(context));
        }
        Ok((sequences * tokens) as f64 / best)
    }

    fn step(&mut self, kvs: &mut [KvCache], tokens: &[u32], phase: StepPhase) -> Outcome<()> {
        let item = |kv| StepItem { kv, tokens, want_logits: true, phase };
        let mut items: Vec<StepItem<'_>> = kvs.iter_mut().map(item).collect();
        self.model.step(&mut items, &mut self.ep)?;
        Ok(())
    }
}

#[allow(clippy::print_stdout, reason = "an example's output")]
fn main() -> Outcome<()> {
    let model_dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/tiny-qwen3moe-15m"));
    let start = Instant::now();
    let mut bench = Bench::new(model_dir)?;
    println!("loaded in {:.0} ms", start.elapsed().as_secs_f64() * 1e3);
    for (sequences, tokens) in [(1, 32), (1, 128), (1, 512), (4, 512), (1, 2048)] {
        let rate = bench.measure(sequences, 0, tokens, StepPhase::Prefill)?;
        println!("prefill {sequences} x {tokens:5} tokens: {rate:8.0} tokens/s");
    }
    for (sequences, context) in [(1, 32), (1, 512), (2, 128), (4, 128), (8, 128), (16, 128), (16, 512), (64, 128)] {
        let rate = bench.measure(sequences, context, 1, StepPhase::Decode)?;
        println!("decode  {sequences:2} sequences after {context:4} tokens: {rate:8.0} tokens/s");
    }
    Ok(())
}
