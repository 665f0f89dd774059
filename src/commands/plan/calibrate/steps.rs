//! Measures steps of the worker's model on one rank and in layouts of several ranks.

use std::path::Path;
use std::time::Duration;

use semmoe_kernels::collectives::{PrivateMemory, RowCollectives};
use semmoe_planner::calibration::StepPoint;
use semmoe_planner::layout::Layout;
use semmoe_planner::step::Work;
use semmoe_tables::{Attention, Placement, RankId};
use semmoe_worker::ep::{
    ExpertLayout, ExpertParallel, LayerTimings, LocalTransport, StepPhase, TimedCollective, Timings, WireRows,
};
use semmoe_worker::model::{KvCache, Model, ModelConfig, StepItem, Wants};

use super::team::{Meeting, Team, on_ranks, seconds};
use crate::error::CliError;

/// The work in a step: per rank with attention dp, over all ranks with attention tp.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    pub(super) sequences: usize,
    /// New tokens per sequence.
    pub(super) tokens: usize,
    /// Cached tokens per sequence.
    pub(super) cached: usize,
}

/// Layout of a worker unit.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkerLayout {
    pub(super) ranks: usize,
    pub(super) attention: Attention,
    pub(super) experts: ExpertLayout,
}

/// One rank's model, ready to run steps.
struct Rank {
    rank: usize,
    /// Whether attention is split across the ranks.
    split: bool,
    model: Model,
    ep: ExpertParallel,
    /// Number of tokens drawn so far. Draws are spread over the vocabulary and reproducible.
    drawn: u64,
}

impl Job {
    /// Whether the model's context fits a sequence of this length.
    pub(super) fn fits(&self, config: &ModelConfig) -> bool {
        self.cached + self.tokens <= config.max_positions
    }

    fn work(&self, groups: usize) -> Work {
        let sequences = (self.sequences * groups) as f64;
        Work { sequences, tokens: self.tokens as f64, cached: self.cached as f64 }
    }
}

impl WorkerLayout {
    pub(super) const ONE: Self = Self { ranks: 1, attention: Attention::Dp, experts: ExpertLayout::Ep };

    /// The planner's equivalent.
    pub(super) fn planned(self) -> Layout {
        let ranks = self.ranks as u64;
        let [tp, dp] = if self.attention == Attention::Tp { [ranks, 1] } else { [1, ranks] };
        let [cut, whole] = if self.experts == ExpertLayout::Tp { [ranks, 1] } else { [1, ranks] };
        Layout { pipeline: 1, attention_tp: tp, attention_dp: dp, expert_tp: cut, expert_ep: whole }
    }

    /// Number of groups with their own sequences.
    fn groups(self) -> usize {
        if self.attention == Attention::Tp { 1 } else { self.ranks }
    }
}

impl Rank {
    fn load(folder: &Path, rank: usize, layout: WorkerLayout, unit: WireRows) -> Result<Self, CliError> {
        let config = ModelConfig::load(folder).map_err(CliError::input)?;
        let groups = u16::try_from(layout.ranks).unwrap_or(u16::MAX);
        let placement = Placement::contiguous(config.num_moe_layers(), config.num_experts as u16, groups)
            .map_err(CliError::input)?;
        let id = RankId::new(rank as u16);
        let model = Model::load_divided(folder, id, &placement, layout.experts, layout.attention);
        let ep = ExpertParallel::over(unit, &placement, layout.experts).map_err(CliError::failed)?;
        // With attention tp all ranks have the same tokens.
        let drawn = if layout.attention == Attention::Tp { 0 } else { rank as u64 };
        let (split, model) = (layout.attention == Attention::Tp, model.map_err(CliError::input)?);
        Ok(Self { rank, split, model, ep, drawn })
    }

    fn alone(folder: &Path) -> Result<Self, CliError> {
        let link = LocalTransport::mesh(1).remove(0);
        let rows = RowCollectives::new(link, PrivateMemory::new(0));
        Self::load(folder, 0, WorkerLayout::ONE, WireRows::f32(Box::new(rows)))
    }

    fn step(&mut self, caches: &mut [KvCache], tokens: usize, phase: StepPhase) -> Result<(), CliError> {
        let Self { rank, split, model, ep, drawn } = self;
        let vocabulary = model.config().vocab_size as u64;
        let word = |_| {
            *drawn = drawn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((*drawn >> 33) % vocabulary) as u32
        };
        let words: Vec<u32> = (0..caches.len() * tokens).map(word).collect();
        // With attention tp, each sequence's tokens are sampled on one rank.
        let wanted = |at: usize| if !*split || at % ep.world() == *rank { Wants::Logits } else { Wants::Nothing };
        let item = |(at, (kv, tokens))| StepItem { kv, tokens, wants: wanted(at), phase };
        let mut items: Vec<StepItem<'_>> = caches.iter_mut().zip(words.chunks(tokens)).enumerate().map(item).collect();
        model.step(&mut items, ep).map(drop).map_err(CliError::failed)
    }

    /// Measures the seconds of a step with this job, and the seconds spent in experts: the mean per layer times the
    /// number of layers.
    fn measure(&mut self, job: Job, meeting: &Meeting, time: Duration) -> Result<Measured, CliError> {
        let mut caches: Vec<KvCache> = (0..job.sequences).map(|_| self.model.new_sequence()).collect();
        let phase = if job.tokens > 1 { StepPhase::Prefill } else { StepPhase::Decode };
        if job.cached > 0 {
            self.step(&mut caches, job.cached, StepPhase::Prefill)?;
        }
        let (rank, before) = (self.rank, experts(self.ep.timings()));
        let mut steps = 0u32;
        let whole = seconds(rank, meeting, time, || {
            steps += 1;
            self.step(&mut caches, job.tokens, phase)?;
            caches.iter_mut().for_each(|cache| cache.truncate(job.cached));
            Ok(())
        })?;
        let experts = (experts(self.ep.timings()) - before) / f64::from(steps);
        Ok(Measured { whole, experts })
    }
}

/// Seconds of a step.
#[derive(Clone, Copy, Debug)]
struct Measured {
    whole: f64,
    /// Seconds spent in the experts, averaged over all steps.
    experts: f64,
}

/// Seconds that a rank has spent on expert computation so far.
fn experts(timings: &Timings) -> f64 {
    let of = |layer: &LayerTimings| {
        let exchange = layer.of(TimedCollective::Dispatch) + layer.of(TimedCollective::Combine);
        layer.moe.saturating_sub(exchange).as_secs_f64()
    };
    timings.layers.iter().map(of).sum()
}

/// Measures single-rank steps, with the time spent in experts.
pub(super) fn alone(folder: &Path, jobs: &[Job], each: Duration) -> Result<Vec<StepPoint>, CliError> {
    on_ranks(vec![()], |_, (), meeting| {
        let mut rank = Rank::alone(folder)?;
        let point = |job: &Job| {
            let Measured { whole, experts } = rank.measure(*job, meeting, each)?;
            let layout = WorkerLayout::ONE.planned();
            Ok(StepPoint { layout, work: job.work(1), seconds: whole, experts: Some(experts) })
        };
        jobs.iter().map(point).collect()
    })
}

/// Measures steps of a unit over a transport.
pub(super) fn together(
    folder: &Path,
    layout: WorkerLayout,
    team: Team,
    jobs: &[Job],
    each: Duration,
) -> Result<Vec<StepPoint>, CliError> {
    on_ranks(team.units()?, |id, unit, meeting| {
        let mut rank = Rank::load(folder, id, layout, WireRows::f32(unit))?;
        let point = |job: &Job| {
            let Measured { whole, .. } = rank.measure(*job, meeting, each)?;
            Ok(StepPoint { layout: layout.planned(), work: job.work(layout.groups()), seconds: whole, experts: None })
        };
        jobs.iter().map(point).collect()
    })
}
