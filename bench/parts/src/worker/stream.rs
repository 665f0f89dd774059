//! How much of the reading of experts overlaps with computation on one rank with memory for some of a synthetic
//! checkpoint's 402 MB of experts, against HybridEP's stream model: a layer takes `max(PE, F)`, where PE is its time
//! with all experts in memory and F the time to read, so at most `min(1, PE / F)` of the reading can be hidden. Rounds
//! of both kinds alternate within one run.

use std::path::Path;
use std::time::{Duration, Instant};

use semmoe_tables::{Attention, ExpertCopies, Placement, RankId};
use semmoe_worker::ep::{ExpertLayout, ExpertParallel, LocalTransport, StepPhase};
use semmoe_worker::model::{ExpertFetches, ExpertMemory, ExpertRoom, Model, StepItem, Wants};

use super::{EXPERT_BYTES, EXPERTS, LAYERS, write_checkpoint};
use crate::measure::{Outcome, median};

const ROUNDS: usize = 5;
/// Steps of each kind per round.
const STEPS: usize = 4;
/// Tokens of a step; each step is the prompt of one sequence.
const TOKENS: [usize; 5] = [1, 32, 128, 256, 480];
/// Resident experts per layer.
const RESIDENT: [usize; 4] = [0, 16, 24, 28];

struct Rank {
    model: Model,
    ep: ExpertParallel,
}

/// Timed steps, and the bytes read during them.
struct Steps {
    seconds: f64,
    fetching: f64,
    waited: f64,
}

impl Rank {
    fn load(dir: &Path, memory: Option<ExpertMemory>) -> Outcome<Self> {
        let replicas = ExpertCopies::from(&Placement::contiguous(LAYERS, EXPERTS as u16, 1)?);
        let room = ExpertRoom { memory, ..ExpertLayout::Ep.into() };
        let model = Model::load_divided(dir, RankId::new(0), &replicas, room, Attention::Dp)?;
        let link = Box::new(LocalTransport::mesh(1).remove(0));
        Ok(Self { model, ep: ExpertParallel::new(link, replicas)? })
    }

    /// Consecutive steps after a first one, which uses up what was prefetched while idle.
    fn steps(&mut self, tokens: &[u32]) -> Outcome<Steps> {
        self.step(tokens)?;
        let before = self.model.expert_fetches().unwrap_or_default();
        let began = Instant::now();
        for _ in 0..STEPS {
            self.step(tokens)?;
        }
        let seconds = began.elapsed().as_secs_f64();
        let after = self.model.expert_fetches().unwrap_or_default();
        let during = |of: fn(&ExpertFetches) -> Duration| (of(&after) - of(&before)).as_secs_f64();
        Ok(Steps { seconds, fetching: during(|of| of.fetching), waited: during(|of| of.waited) })
    }

    fn step(&mut self, tokens: &[u32]) -> Outcome<()> {
        let mut kv = self.model.new_sequence();
        let mut items = [StepItem { kv: &mut kv, tokens, wants: Wants::Logits, phase: StepPhase::Prefill }];
        self.model.step(&mut items, &mut self.ep)?;
        Ok(())
    }
}

/// Prints a line for each memory and step.
pub(crate) fn run() -> Outcome<()> {
    let folder = tempfile::tempdir()?;
    write_checkpoint(folder.path())?;
    let mut whole = Rank::load(folder.path(), None)?;
    let all = LAYERS * EXPERTS * EXPERT_BYTES;
    println!(
        "{LAYERS} layers of {EXPERTS} experts, {} MB in all; medians of {ROUNDS} rounds, ms a layer",
        all / 1_000_000
    );
    println!(
        "{:>8} {:>7} | {:>7} {:>7} {:>7} {:>7} | {:>6} {:>8}",
        "MB", "tokens", "PE", "F", "layer", "model", "hidden", "possible"
    );
    for stay in RESIDENT {
        let mut streaming = Rank::load(folder.path(), Some(ExpertMemory::Resident(stay)))?;
        for count in TOKENS {
            let tokens: Vec<u32> = (0..count).map(|at| (37 * at % 251) as u32).collect();
            let mut rounds = Vec::new();
            for _ in 0..ROUNDS {
                rounds.push((whole.steps(&tokens)?.seconds, streaming.steps(&tokens)?));
            }
            let layers = (STEPS * LAYERS) as f64;
            let of = |value: fn(&(f64, Steps)) -> f64| 1e3 * median(rounds.iter().map(value).collect()) / layers;
            let (computed, layer) = (of(|round| round.0), of(|round| round.1.seconds));
            let (fetching, waited) = (of(|round| round.1.fetching), of(|round| round.1.waited));
            println!(
                "{:>8} {count:>7} | {computed:>7.2} {fetching:>7.2} {layer:>7.2} {:>7.2} | {:>6.2} {:>8.2}",
                streaming.model.expert_fetches().unwrap_or_default().memory_bytes / 1_000_000,
                computed.max(fetching),
                1.0 - waited / fetching,
                (computed / fetching).min(1.0),
            );
        }
    }
    Ok(())
}
