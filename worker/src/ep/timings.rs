//! Where the time of a rank's steps goes: wall-clock time of whole steps, of MoE layers, and of the collectives in them.
//!
//! A collective takes as long as its slowest rank: its time holds the waiting for ranks that are still computing, as well as
//! the transfer. What the links cost is the difference to the same work over faster links.

use std::time::Duration;

use semmoe_tables::LayerIdx;
use serde::{Deserialize, Serialize};

/// A collective of one layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimedCollective {
    /// Tokens go to their experts.
    Dispatch,
    /// The experts' sums come back.
    Combine,
    /// Attention's partial sums are added up, each token on its rank.
    Scatter,
    /// Tokens come back to all ranks.
    Gather,
}

impl TimedCollective {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Dispatch, Self::Combine, Self::Scatter, Self::Gather];

    /// Its name in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Dispatch => "dispatch",
            Self::Combine => "combine",
            Self::Scatter => "scatter",
            Self::Gather => "gather",
        }
    }
}

/// Times of one MoE layer since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct LayerTimings {
    /// From the chosen experts to the sum of their results: dispatch, experts, combine.
    pub moe: Duration,
    collectives: [Duration; TimedCollective::ALL.len()],
}

impl LayerTimings {
    /// Time in one collective.
    #[must_use]
    pub fn of(&self, collective: TimedCollective) -> Duration {
        self.collectives[collective as usize]
    }
}

/// Times of one rank since the start. A step in which the rank has no tokens of its own is a step, too.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Timings {
    /// `[L]`
    pub layers: Vec<LayerTimings>,
    /// Steps through the whole model.
    pub steps: u64,
    /// Their time, all layers and collectives included.
    pub step: Duration,
}

impl Timings {
    pub(super) fn new(layers: usize) -> Self {
        Self { layers: vec![LayerTimings::default(); layers], ..Self::default() }
    }

    pub(super) fn add_step(&mut self, time: Duration) {
        self.steps += 1;
        self.step += time;
    }

    /// A layer that there is not is not counted.
    pub(super) fn add_moe(&mut self, layer: LayerIdx, time: Duration) {
        if let Some(timings) = self.layers.get_mut(layer.index()) {
            timings.moe += time;
        }
    }

    /// As [`Timings::add_moe`].
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
        timings.add_step(ms(7));
        timings.add_step(ms(8));
        assert_eq!((timings.steps, timings.step, timings.layers.len()), (2, ms(15), 2));
        assert_eq!(timings.layers[0], LayerTimings { moe: ms(5), ..LayerTimings::default() });
        let found = TimedCollective::ALL.map(|collective| timings.layers[1].of(collective));
        assert_eq!(found, [11, 22, 33, 44].map(ms));
        assert_eq!(timings.layers[1].moe, Duration::ZERO);
    }
}
