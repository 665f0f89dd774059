//! The parts of a step.

use serde::Serialize;

/// Seconds of one step, all layers together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StepTerms {
    /// Query, key, value and output projections, norms.
    pub attention_products: f64,
    /// Attention over the cache and the prompt.
    pub attention_core: f64,
    /// Routed experts of the busiest rank.
    pub experts: f64,
    /// Shared experts and dense layers.
    pub dense: f64,
    /// Output projection.
    pub output: f64,
    /// Sums over the ranks that share a sequence's heads.
    pub attention_reduce: f64,
    /// Tokens to their experts, what is not hidden.
    pub dispatch: f64,
    /// Results back, what is not hidden.
    pub combine: f64,
    /// Allgather and sums over the ranks that share an expert.
    pub expert_shards: f64,
    /// From stage to stage.
    pub pipeline: f64,
    /// Small kernels, launches, scheduling, sampling.
    pub overhead: f64,
}

/// One part, for a table.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Term {
    /// The part's name.
    pub name: &'static str,
    /// Seconds in the step.
    pub seconds: f64,
    /// Where the formula is from.
    pub source: &'static str,
}

impl StepTerms {
    /// Seconds of the step.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.terms().iter().map(|term| term.seconds).sum()
    }

    /// Seconds that depend on which rank a token's experts are on.
    #[must_use]
    pub fn exchange(&self) -> f64 {
        self.dispatch + self.combine
    }

    /// All parts.
    #[must_use]
    pub fn terms(&self) -> [Term; 11] {
        let term = |name, seconds, source| Term { name, seconds, source };
        [
            term("attention products", self.attention_products, "roofline: max(2 P t / FLOP/s, bytes / HBM)"),
            term("attention core", self.attention_core, "roofline: max(pairs / FLOP/s, cache bytes / HBM)"),
            term("routed experts", self.experts, "roofline; experts read: E/EP (1 - (1 - k/E)^tokens)"),
            term("shared, dense", self.dense, "roofline"),
            term("output projection", self.output, "roofline"),
            term(
                "attention all-reduce",
                self.attention_reduce,
                "MixServe eqs 1, 2 corrected: 2 x (d-1)/(d B) + latency",
            ),
            term("dispatch", self.dispatch, "MixServe eqs 3, 5: one copy per group of ranks, sliced over attention TP"),
            term("combine", self.combine, "MixServe eqs 3, 5"),
            term("expert shards", self.expert_shards, "MixServe eq 13: allgather and reduce-scatter over expert TP"),
            term("pipeline", self.pipeline, "MixServe eq 6: (PP - 1) point-to-point"),
            term("overhead", self.overhead, "constants: layer_seconds, step_seconds"),
        ]
    }
}
