//! Breakdown of a rank's step time: wall-clock time of whole steps, of MoE layers, and of the collectives in them.
//!
//! A collective takes as long as its slowest rank, so its time includes the wait for ranks that are still computing. To
//! measure the cost of the links, compare with the same work over faster links.

use std::time::Duration;

use semmoe_tables::{Attention, LayerIdx};
use serde::{Deserialize, Serialize};

use super::counters::StepPhase;
use super::layout::ExpertLayout;

/// A collective of one layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimedCollective {
    /// Sends tokens to their experts.
    Dispatch,
    /// Returns the experts' sums.
    Combine,
    /// Sums attention's partial results and scatters each token to its rank.
    Scatter,
    /// Gathers tokens on all ranks.
    Gather,
}

impl TimedCollective {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Dispatch, Self::Combine, Self::Scatter, Self::Gather];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dispatch => "dispatch",
            Self::Combine => "combine",
            Self::Scatter => "scatter",
            Self::Gather => "gather",
        }
    }
}

/// Times of one MoE layer since startup.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct LayerTimings {
    /// Time from the router's choice to the combined output: dispatch, experts and combine.
    pub moe: Duration,
    collectives: [Duration; TimedCollective::ALL.len()],
}

impl LayerTimings {
    /// Time in one collective.
    pub fn of(&self, collective: TimedCollective) -> Duration {
        self.collectives[collective as usize]
    }
}

/// A rank's work in one step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepBatch {
    /// Layout of attention.
    pub attention: Attention,
    /// Sequences that decode one token each.
    pub sequences: usize,
    /// Prompt tokens in the same step.
    pub prompt_tokens: usize,
}

impl StepBatch {
    /// Returns the upper end of this batch's half-octave bucket: 0, 1, 2, 4, 5, 8, 11, 16, ... The batch size is the
    /// number of prompt tokens in a prefill step, and the number of sequences in any other step.
    fn bucket(&self) -> u32 {
        match if self.prompt_tokens > 0 { self.prompt_tokens } else { self.sequences } {
            0 => 0,
            batch => ((2.0 * (batch as f64).log2()).ceil() / 2.0).exp2() as u32,
        }
    }
}

/// Steps with the same layout, phase and half-octave batch bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StepCount {
    /// Layout of attention.
    pub attention: Attention,
    /// Layout of experts.
    pub experts: ExpertLayout,
    /// The phase: prefill if the steps had prompt tokens.
    pub phase: StepPhase,
    /// The largest batch in this bucket on this rank: prompt tokens in a prefill step, otherwise sequences.
    pub batch: u32,
    /// Number of steps.
    pub steps: u64,
    /// Total time of the steps.
    pub time: Duration,
}

/// One rank's times since startup, including steps in which the rank has no tokens.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Timings {
    /// `[L]`
    pub layers: Vec<LayerTimings>,
    /// Number of steps through the whole model.
    pub steps: u64,
    /// Total time of the steps, including all layers and collectives.
    pub step: Duration,
    /// Steps by layout, phase and batch: only combinations that occurred, at most 70 per layout.
    pub by_batch: Vec<StepCount>,
}

impl Timings {
    pub(super) fn new(layers: usize) -> Self {
        Self { layers: vec![LayerTimings::default(); layers], ..Self::default() }
    }

    pub(super) fn add_step(&mut self, experts: ExpertLayout, batch: &StepBatch, time: Duration) {
        self.steps += 1;
        self.step += time;
        let phase = if batch.prompt_tokens > 0 { StepPhase::Prefill } else { StepPhase::Decode };
        let new = StepCount { attention: batch.attention, experts, phase, batch: batch.bucket(), steps: 1, time };
        match self.by_batch.iter_mut().find(|count| StepCount { steps: 1, time, ..**count } == new) {
            Some(count) => {
                count.steps += 1;
                count.time += time;
            }
            None => self.by_batch.push(new),
        }
    }

    /// Ignores unknown layers.
    pub(super) fn add_moe(&mut self, layer: LayerIdx, time: Duration) {
        if let Some(timings) = self.layers.get_mut(layer.index()) {
            timings.moe += time;
        }
    }

    /// Adds `time` to a layer's collective; ignores unknown layers.
    pub(super) fn add(&mut self, layer: LayerIdx, collective: TimedCollective, time: Duration) {
        if let Some(timings) = self.layers.get_mut(layer.index()) {
            timings.collectives[collective as usize] += time;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_add_up_by_layer_and_collective() {
        let mut timings = Timings::new(2);
        let ms = Duration::from_millis;
        for (at, collective) in (1..).zip(TimedCollective::ALL) {
            timings.add(LayerIdx::new(1), collective, ms(at));
            timings.add(LayerIdx::new(1), collective, ms(10 * at));
            timings.add(LayerIdx::new(2), collective, ms(1000));
        }
        timings.add_moe(LayerIdx::new(0), ms(5));
        let batch = StepBatch { attention: Attention::Dp, sequences: 3, prompt_tokens: 0 };
        timings.add_step(ExpertLayout::Ep, &batch, ms(7));
        timings.add_step(ExpertLayout::Ep, &batch, ms(8));
        assert_eq!((timings.steps, timings.step, timings.layers.len()), (2, ms(15), 2));
        assert_eq!(timings.layers[0], LayerTimings { moe: ms(5), ..LayerTimings::default() });
        let found = TimedCollective::ALL.map(|collective| timings.layers[1].of(collective));
        assert_eq!(found, [11, 22, 33, 44].map(ms));
        assert_eq!(timings.layers[1].moe, Duration::ZERO);
    }

    #[test]
    fn steps_are_counted_by_layout_phase_and_half_octave() {
        let mut timings = Timings::default();
        let ms = Duration::from_millis;
        let decode = |sequences| StepBatch { attention: Attention::Dp, sequences, prompt_tokens: 0 };
        for (sequences, bucket) in
            [(0, 0), (1, 1), (2, 2), (3, 4), (4, 4), (5, 5), (6, 8), (8, 8), (9, 11), (12, 16), (46, 64), (64, 64)]
        {
            assert_eq!(decode(sequences).bucket(), bucket, "{sequences}");
        }
        timings.add_step(ExpertLayout::Ep, &decode(3), ms(5));
        timings.add_step(ExpertLayout::Ep, &decode(4), ms(7));
        timings.add_step(ExpertLayout::Tp, &decode(4), ms(11));
        timings.add_step(ExpertLayout::Tp, &StepBatch { prompt_tokens: 100, ..decode(4) }, ms(13));
        timings.add_step(ExpertLayout::Tp, &StepBatch { attention: Attention::Tp, ..decode(4) }, ms(17));
        let kind = |count: &StepCount| (count.experts, count.attention, count.phase, count.batch);
        let found: Vec<_> = timings.by_batch.iter().map(|count| (kind(count), count.steps, count.time)).collect();
        let expected = [
            ((ExpertLayout::Ep, Attention::Dp, StepPhase::Decode, 4), 2, ms(12)),
            ((ExpertLayout::Tp, Attention::Dp, StepPhase::Decode, 4), 1, ms(11)),
            ((ExpertLayout::Tp, Attention::Dp, StepPhase::Prefill, 128), 1, ms(13)),
            ((ExpertLayout::Tp, Attention::Tp, StepPhase::Decode, 4), 1, ms(17)),
        ];
        assert_eq!(found, expected);
        assert_eq!((timings.steps, timings.step), (5, ms(53)), "each step is counted once");
    }
}
