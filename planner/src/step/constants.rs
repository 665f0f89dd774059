//! The constants of the physical model.

use serde::{Deserialize, Serialize};

use crate::PlanError;
use crate::error::{not_negative, positive};

/// Constants that relate an engine's performance on a GPU to the data sheet. A set applies to one engine and one kind
/// of GPU.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Constants {
    /// Fraction of the GPU's FLOP/s achieved by products with dense weights.
    pub dense_flops_share: f64,
    /// Fraction of the GPU's FLOP/s achieved by routed experts.
    pub expert_flops_share: f64,
    /// Fraction of the GPU's FLOP/s achieved by prompt attention.
    pub attention_flops_share: f64,
    /// Fraction of the memory bandwidth achieved when reading dense weights.
    pub weight_bandwidth_share: f64,
    /// Fraction of the memory bandwidth achieved when reading routed experts, in grouped products of a few rows each.
    pub expert_bandwidth_share: f64,
    /// Fraction of the memory bandwidth achieved when reading the KV cache.
    pub cache_bandwidth_share: f64,
    /// Sharpness p of the transition from memory-bound to compute-bound products: the time is `(read^p +
    /// compute^p)^(1/p)`.
    pub roofline_sharpness: f64,
    /// Fraction of a link's bandwidth achieved by collectives.
    pub link_bandwidth_share: f64,
    /// Overhead of a collective in seconds, in addition to the latencies of its levels.
    pub collective_seconds: f64,
    /// Overhead of a layer in seconds, in addition to its products and collectives: small kernels, launches.
    pub layer_seconds: f64,
    /// Additional seconds of an MoE layer: routing, sorting, scaling of activations.
    pub moe_layer_seconds: f64,
    /// Overhead of a step in seconds, in addition to its layers: scheduling, sampling.
    pub step_seconds: f64,
    /// Additional seconds of a step per sequence in an attention-DP group.
    pub sequence_seconds: f64,
    /// Seconds that a request takes before its prefill begins: HTTP, tokenization, admission.
    pub request_seconds: f64,
    /// Number of decoding steps that a new request waits for if other requests are in flight.
    pub admission_steps: f64,
    /// Fraction of the requests in flight whose prompts arrive together, each waiting for half of the others.
    pub burst_share: f64,
    /// Token load of the busiest rank's experts over the mean.
    pub expert_load_max_over_mean: f64,
    /// Fraction of a step's tokens that choose experts independently; the others choose the same experts as their
    /// neighbours, so no additional experts are read.
    pub expert_spread: f64,
    /// Bytes per element in dispatch (1: FP8).
    pub dispatch_bytes: f64,
    /// Bytes per element in combine and in reductions.
    pub combine_bytes: f64,
    /// Fraction of the communication between expert ranks that is hidden behind computation: 0 without overlap, up to 1
    /// with two micro-batches.
    pub overlap_share: f64,
    /// Fraction of a prefill that delays other requests' decoding: 1 if they wait for the whole prefill.
    pub prefill_interference: f64,
    /// Fraction of the GPU's memory that the engine uses.
    pub memory_share: f64,
    /// Maximum tokens per step and rank (the prefill chunk).
    pub step_tokens: f64,
    /// With attention TP, whether each rank processes only a part of the rows after attention until the next layer (SRS
    /// and SAG, as in semmoe's worker), so that only one rank sends a token to its experts. Otherwise every rank keeps
    /// all rows, and sums are all-reduced.
    #[serde(default)]
    pub scattered_rows: bool,
    /// Whether a step takes as long as its slowest rank group: the group with the most experts to read, or the only
    /// group with a prompt. Disabled for constants that were fitted without it, as they already include its mean
    /// effect.
    #[serde(default)]
    pub slowest_group: bool,
}

impl Constants {
    /// Returns round values in the range of existing engines. They are not fitted to measurements, so predictions with
    /// them are uncalibrated.
    pub fn uncalibrated() -> Self {
        Self {
            dense_flops_share: 0.7,
            expert_flops_share: 0.5,
            attention_flops_share: 0.5,
            weight_bandwidth_share: 0.8,
            expert_bandwidth_share: 0.65,
            cache_bandwidth_share: 0.7,
            roofline_sharpness: 8.0,
            link_bandwidth_share: 0.75,
            collective_seconds: 5e-6,
            layer_seconds: 30e-6,
            moe_layer_seconds: 0.0,
            step_seconds: 1e-3,
            sequence_seconds: 0.0,
            request_seconds: 5e-3,
            admission_steps: 0.0,
            burst_share: 0.0,
            expert_load_max_over_mean: 1.2,
            expert_spread: 1.0,
            dispatch_bytes: 2.0,
            combine_bytes: 2.0,
            overlap_share: 0.0,
            prefill_interference: 1.0,
            memory_share: 0.88,
            step_tokens: 8192.0,
            scattered_rows: false,
            slowest_group: true,
        }
    }

    /// Checks all values.
    ///
    /// # Errors
    /// [`PlanError::Value`] for the first value outside its domain.
    pub fn check(&self) -> Result<(), PlanError> {
        let shares = [
            ("dense_flops_share", self.dense_flops_share),
            ("expert_flops_share", self.expert_flops_share),
            ("attention_flops_share", self.attention_flops_share),
            ("weight_bandwidth_share", self.weight_bandwidth_share),
            ("expert_bandwidth_share", self.expert_bandwidth_share),
            ("cache_bandwidth_share", self.cache_bandwidth_share),
            ("link_bandwidth_share", self.link_bandwidth_share),
            ("memory_share", self.memory_share),
            ("dispatch_bytes", self.dispatch_bytes),
            ("combine_bytes", self.combine_bytes),
            ("step_tokens", self.step_tokens),
            ("expert_load_max_over_mean", self.expert_load_max_over_mean),
            ("expert_spread", self.expert_spread),
            ("roofline_sharpness", self.roofline_sharpness),
        ];
        let times = [
            ("collective_seconds", self.collective_seconds),
            ("layer_seconds", self.layer_seconds),
            ("moe_layer_seconds", self.moe_layer_seconds),
            ("step_seconds", self.step_seconds),
            ("sequence_seconds", self.sequence_seconds),
            ("admission_steps", self.admission_steps),
            ("burst_share", self.burst_share),
            ("request_seconds", self.request_seconds),
            ("overlap_share", self.overlap_share),
            ("prefill_interference", self.prefill_interference),
        ];
        shares.into_iter().try_for_each(|(name, value)| positive(name, value).map(drop))?;
        times.into_iter().try_for_each(|(name, value)| not_negative(name, value).map(drop))
    }
}
