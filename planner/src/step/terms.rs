//! The parts of a step.

use std::iter::Sum;
use std::ops::{Add, Index, Mul};

use serde::{Serialize, Serializer};

/// A part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Query, key, value and output projections, norms.
    AttentionProducts,
    /// Attention over the KV cache and the prompt.
    AttentionCore,
    /// Routed experts on the busiest rank.
    Experts,
    /// Shared experts and dense layers.
    Dense,
    /// Output projection.
    Output,
    /// Sums over ranks that share a sequence's heads.
    AttentionReduce,
    /// The exposed part of sending tokens to their experts.
    Dispatch,
    /// The exposed part of returning expert results.
    Combine,
    /// Allgather and sums over ranks that share an expert or a dense layer.
    ExpertShards,
    /// Transfers between pipeline stages.
    Pipeline,
    /// Small kernels, launches, scheduling, sampling.
    Overhead,
}

/// Each part, its JSON key, its name in tables, and the source of its formula.
const PARTS: [(Part, &str, &str, &str); 11] = [
    (
        Part::AttentionProducts,
        "attention_products",
        "attention products",
        "roofline: the longer of 2 P t / FLOP/s and bytes / HBM",
    ),
    (Part::AttentionCore, "attention_core", "attention core", "roofline: max(pairs / FLOP/s, cache bytes / HBM)"),
    (Part::Experts, "experts", "routed experts", "roofline; experts read: E/EP (1 - (1 - k/E)^tokens)"),
    (Part::Dense, "dense", "shared, dense", "roofline"),
    (Part::Output, "output", "output projection", "roofline"),
    (
        Part::AttentionReduce,
        "attention_reduce",
        "attention all-reduce",
        "MixServe eqs 1, 2 corrected: 2 x (d-1)/(d B) + latency",
    ),
    (
        Part::Dispatch,
        "dispatch",
        "dispatch",
        "MixServe eqs 3, 5: one copy per group of ranks, sliced over attention TP",
    ),
    (Part::Combine, "combine", "combine", "MixServe eqs 3, 5"),
    (
        Part::ExpertShards,
        "expert_shards",
        "expert shards",
        "MixServe eq 13: allgather and reduce-scatter over expert TP; all-reduce of dense layers",
    ),
    (Part::Pipeline, "pipeline", "pipeline", "MixServe eq 6: (PP - 1) point-to-point"),
    (
        Part::Overhead,
        "overhead",
        "overhead",
        "constants: layer_seconds, moe_layer_seconds, step_seconds, sequence_seconds",
    ),
];

/// A time, and whether it comes from a measured table.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timed {
    /// Seconds.
    pub seconds: f64,
    /// Whether all nonzero parts come from tables.
    pub measured: bool,
}

impl Add for Timed {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let measured = match (self.seconds > 0.0, other.seconds > 0.0) {
            (true, true) => self.measured && other.measured,
            (true, false) => self.measured,
            (false, _) => other.measured,
        };
        Self { seconds: self.seconds + other.seconds, measured }
    }
}

impl Mul<f64> for Timed {
    type Output = Self;

    fn mul(self, times: f64) -> Self {
        Self { seconds: self.seconds * times, ..self }
    }
}

impl Sum for Timed {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), Add::add)
    }
}

/// Seconds of one step over all layers. Serialised as an object with each part's seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTerms([Timed; PARTS.len()]);

/// One part of a step, for display in a table.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Term {
    /// The part's name.
    pub name: &'static str,
    /// Seconds in the step.
    pub seconds: f64,
    /// Source of the time: measured tables, or a formula.
    pub source: &'static str,
}

impl StepTerms {
    /// Multiplies all parts set so far by `times`.
    pub(super) fn scale(&mut self, times: f64) {
        self.0 = self.0.map(|part| part * times);
    }

    pub(super) fn set(&mut self, part: Part, timed: Timed) {
        self.0[part as usize] = timed;
    }

    /// Seconds of the step.
    pub fn total(&self) -> f64 {
        self.0.iter().map(|part| part.seconds).sum()
    }

    /// Seconds that depend on which ranks host a token's experts.
    pub fn exchange(&self) -> f64 {
        self[Part::Dispatch] + self[Part::Combine]
    }

    /// All parts.
    pub fn terms(&self) -> [Term; PARTS.len()] {
        PARTS.map(|(part, _, name, formula)| {
            let Timed { seconds, measured } = self.0[part as usize];
            Term { name, seconds, source: if measured { "measured tables" } else { formula } }
        })
    }
}

impl Index<Part> for StepTerms {
    type Output = f64;

    fn index(&self, part: Part) -> &f64 {
        &self.0[part as usize].seconds
    }
}

impl Serialize for StepTerms {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(PARTS.map(|(part, key, ..)| (key, self[part])))
    }
}
