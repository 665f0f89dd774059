//! f(layout, batch): decode steps of a synthetic checkpoint with 402 MB of experts on two ranks, which are threads
//! here, by layout and by batch of the whole unit. All layouts alternate within one run. Prints a table and then the
//! curves in the format that `cargo run -p semmoe-bench-switch -- --curves FILE` reads.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Barrier;
use std::time::Instant;

use semmoe_kernels::collectives::{PrivateMemory, RowCollectives};
use semmoe_tables::{Attention, ExpertCopies, Placement, RankId};
use semmoe_worker::ep::{ExpertLayout, ExpertParallel, ExpertPlacement, LocalTransport, Lockstep, StepPhase, WireRows};
use semmoe_worker::model::{AttentionPlan, AttentionSwitch, KvCache, KvPool, Model, StepItem, SwitchOutcome, Wants};
use serde_json::json;

use super::{EXPERT_BYTES, EXPERTS, LAYERS, RANKS, on_ranks, write_checkpoint};
use crate::measure::{Outcome, median};

const ROUNDS: usize = 5;
/// Steps of each layout and batch per round.
const STEPS: usize = 8;
/// Sequences of the whole unit.
const BATCHES: [usize; 4] = [1, 8, 16, 64];
/// Tokens already in each sequence.
const CONTEXT: usize = 16;
/// By the worker's name.
const LAYOUTS: [(&str, Attention, ExpertLayout); 4] = [
    ("ep", Attention::Dp, ExpertLayout::Ep),
    ("dp-tp", Attention::Dp, ExpertLayout::Tp),
    ("tp-ep", Attention::Tp, ExpertLayout::Ep),
    ("tp", Attention::Tp, ExpertLayout::Tp),
];

/// Milliseconds of a step in each round, by layout and batch.
type Steps = BTreeMap<(&'static str, usize), Vec<f64>>;

struct Rank<'a> {
    model: Model,
    ep: ExpertParallel,
    replicas: ExpertCopies,
    together: &'a Barrier,
}

impl<'a> Rank<'a> {
    fn load(dir: &Path, link: LocalTransport, together: &'a Barrier) -> Outcome<Self> {
        let rank = Lockstep::rank(&link);
        let replicas = ExpertCopies::from(&Placement::contiguous(LAYERS, EXPERTS as u16, RANKS as u16)?);
        let rank_id = RankId::new(rank as u16);
        let both = AttentionPlan { both: true, ..Attention::Dp.into() };
        let mut model = Model::load_divided(dir, rank_id, replicas.clone(), ExpertLayout::Ep, both)?;
        model.share_experts(&(0..RANKS).collect::<Vec<_>>());
        let unit = WireRows::f32(Box::new(RowCollectives::new(link, PrivateMemory::new(rank))));
        let ep = ExpertParallel::over(unit, replicas.clone(), ExpertLayout::Ep)?;
        Ok(Self { model, ep, replicas, together })
    }

    fn switch_to(&mut self, attention: Attention, layout: ExpertLayout) -> Outcome<()> {
        let to = ExpertPlacement { layout, replicas: self.replicas.clone() };
        if to != *self.ep.placement() {
            let outcome = self.model.switch_experts(&to, &mut self.ep, &mut |_| None)?;
            if outcome != SwitchOutcome::Committed {
                return Err(format!("{outcome:?}").into());
            }
        }
        let shape = self.model.other_attentions().find(|shape| shape.attention == attention);
        if let Some(shape) = shape {
            let pool = KvPool::new(self.model.cache_shape(), 1, false);
            let switch = AttentionSwitch { pool: &pool, sequences: &[], capacity: 1, lazily: false };
            self.model.prepare_attention(shape, &switch, &mut self.ep, &mut |_| None)?;
            self.model.commit_attention();
        }
        Ok(())
    }

    /// Mean milliseconds of a decode step.
    fn measure(&mut self, batch: usize) -> Outcome<f64> {
        let me = self.ep.rank().index();
        let own = |at: &usize| self.model.attention() == Attention::Tp || at % RANKS == me;
        let tokens: Vec<[u32; CONTEXT]> =
            (0..batch).filter(own).map(|at| std::array::from_fn(|token| (at * 37 + token * 11) as u32 % 256)).collect();
        let mut caches: Vec<KvCache> = tokens.iter().map(|_| self.model.new_sequence()).collect();
        self.step(&mut caches, &tokens, StepPhase::Prefill)?;
        // Warm-up.
        self.decode(&mut caches, &tokens)?;
        self.together.wait();
        let began = Instant::now();
        for _ in 0..STEPS {
            self.decode(&mut caches, &tokens)?;
        }
        Ok(1e3 * began.elapsed().as_secs_f64() / STEPS as f64)
    }

    fn decode(&mut self, caches: &mut [KvCache], tokens: &[[u32; CONTEXT]]) -> Outcome<()> {
        let last: Vec<[u32; 1]> = tokens.iter().map(|tokens| [tokens[0]]).collect();
        self.step(caches, &last, StepPhase::Decode)?;
        caches.iter_mut().for_each(|cache| cache.truncate(CONTEXT));
        Ok(())
    }

    fn step<const N: usize>(&mut self, caches: &mut [KvCache], tokens: &[[u32; N]], phase: StepPhase) -> Outcome<()> {
        let items = caches.iter_mut().zip(tokens);
        let mut items: Vec<StepItem<'_>> =
            items.map(|(kv, tokens)| StepItem { kv, tokens, wants: Wants::Logits, phase }).collect();
        self.model.step(&mut items, &mut self.ep)?;
        Ok(())
    }
}

fn rank_rounds(dir: &Path, link: LocalTransport, together: &Barrier) -> Outcome<Steps> {
    let mut rank = Rank::load(dir, link, together)?;
    let mut steps = Steps::new();
    for _ in 0..ROUNDS {
        for (name, attention, experts) in LAYOUTS {
            rank.switch_to(attention, experts)?;
            for batch in BATCHES {
                let milliseconds = rank.measure(batch)?;
                steps.entry((name, batch)).or_default().push(milliseconds);
            }
        }
    }
    Ok(steps)
}

/// Prints the table and the curves.
pub(crate) fn run() -> Outcome<()> {
    let folder = tempfile::tempdir()?;
    write_checkpoint(folder.path())?;
    let together = Barrier::new(RANKS);
    let of_first = on_ranks(|link| rank_rounds(folder.path(), link, &together))?;
    let steps: BTreeMap<_, f64> = of_first.into_iter().map(|(kind, rounds)| (kind, median(rounds))).collect();
    let megabytes = LAYERS * EXPERTS * EXPERT_BYTES / 1_000_000;
    println!("{RANKS} ranks, {megabytes} MB of experts; ms of a decode step, medians of {ROUNDS} rounds of {STEPS}\n");
    println!("| batch | {} |", LAYOUTS.map(|(name, ..)| name).join(" | "));
    println!("| --- |{}", " --- |".repeat(LAYOUTS.len()));
    for batch in BATCHES {
        println!("| {batch} | {} |", LAYOUTS.map(|(name, ..)| format!("{:.2}", steps[&(name, batch)])).join(" | "));
    }
    let curve = |name| BATCHES.map(|batch| (batch, (1e3 * steps[&(name, batch)]).round() / 1e3));
    let curves =
        ["dp-tp", "tp"].map(|tp| json!({"name": format!("made-up, {tp}"), "tp": curve(tp), "ep": curve("ep")}));
    println!("\n{}", json!(curves));
    Ok(())
}
