//! Kernel times: measured, otherwise from the roofline model.

use super::{Target, Timed};
use crate::cluster::{Kernel, kernel_seconds};
use crate::shape::{Attention, Dtype};

/// Achieved fractions of the GPU's peak rates.
#[derive(Clone, Copy)]
struct Shares {
    flops: f64,
    bandwidth: f64,
}

impl Target<'_> {
    /// Returns a kernel's seconds for `tokens` tokens.
    pub(super) fn kernel(&self, kernel: &Kernel, tokens: f64) -> Timed {
        let roofline = |kernel: &Kernel| self.roofline(kernel, tokens);
        match kernel_seconds(&self.cluster.measured.kernels, kernel, tokens, roofline) {
            Some(seconds) => Timed { seconds, measured: true },
            None => Timed { seconds: roofline(kernel), measured: false },
        }
    }

    fn roofline(&self, kernel: &Kernel, tokens: f64) -> f64 {
        let constants = self.constants;
        match *kernel {
            Kernel::Product { dtype, inputs, outputs } => {
                let parameters = inputs as f64 * outputs as f64;
                let shares = Shares { flops: constants.dense_flops_share, bandwidth: constants.weight_bandwidth_share };
                self.product(2.0 * parameters * tokens, parameters * dtype.bytes(), dtype, shares)
            }
            Kernel::Experts { dtype, hidden, width, experts, local, top_k } => {
                let parameters = 3.0 * hidden as f64 * width as f64;
                let (own, share, k) = (local as f64, local as f64 / experts as f64, top_k as f64);
                let (mean, chosen) =
                    (tokens * k * share, activated(k / experts as f64, tokens * constants.expert_spread));
                // All rank groups wait for the group with the most tokens or the most experts to read.
                let groups = if constants.slowest_group { 1.0 / share } else { 1.0 };
                let most = fullest(groups, mean, mean * (1.0 - share)).min(tokens * k.min(own));
                let busiest = most * constants.expert_load_max_over_mean;
                let read = fullest(groups, own * chosen, own * chosen * (1.0 - chosen)).min(own).min(tokens * k);
                let shares =
                    Shares { flops: constants.expert_flops_share, bandwidth: constants.expert_bandwidth_share };
                self.product(2.0 * parameters * busiest, read * parameters * dtype.bytes(), dtype, shares)
            }
            Kernel::Prefill { dtype, heads, kv_heads, head_dim } => {
                let pairs = heads as f64 * self.pair_operations(head_dim) * tokens * tokens / 2.0;
                self.attention_core(pairs, tokens * kv_heads as f64 * self.cached(head_dim) * dtype.bytes())
            }
            Kernel::Decode { dtype, heads, kv_heads, head_dim, context } => {
                let seen = tokens * context as f64;
                let read = seen * kv_heads as f64 * self.cached(head_dim) * dtype.bytes();
                self.attention_core(seen * heads as f64 * self.pair_operations(head_dim), read)
            }
        }
    }

    /// Returns the time to compute `flops` with elements of `dtype` and to read `bytes`, each at a fraction of the peak
    /// rate: the maximum of both times, smoothed if they are similar.
    fn product(&self, flops: f64, bytes: f64, dtype: Dtype, shares: Shares) -> f64 {
        let compute = flops / (self.cluster.gpu.flops(dtype) * shares.flops);
        let read = bytes / (self.cluster.gpu.hbm * shares.bandwidth);
        let (low, high) = (compute.min(read), compute.max(read));
        if high <= 0.0 {
            return 0.0;
        }
        let sharpness = self.constants.roofline_sharpness;
        high * (1.0 + (low / high).powf(sharpness)).powf(1.0 / sharpness)
    }

    fn attention_core(&self, flops: f64, bytes: f64) -> f64 {
        let compute = flops / (self.cluster.gpu.bf16 * self.constants.attention_flops_share);
        compute.max(bytes / (self.cluster.gpu.hbm * self.constants.cache_bandwidth_share))
    }

    /// FLOPs of one query head per cached token; `head_dim` is the key's.
    fn pair_operations(&self, head_dim: u64) -> f64 {
        let value = match self.shape.attention {
            Attention::Grouped { .. } => head_dim,
            // Absorbed form: values are the latent, and keys also have the rotary part.
            Attention::Latent { kv_rank, rope_dim, .. } if head_dim == kv_rank + rope_dim => kv_rank,
            Attention::Latent { value_dim, .. } => value_dim,
        };
        2.0 * (head_dim + value) as f64
    }

    /// Elements cached per token and KV head.
    fn cached(&self, head_dim: u64) -> f64 {
        match self.shape.attention {
            Attention::Latent { .. } => head_dim as f64,
            Attention::Grouped { .. } => 2.0 * head_dim as f64,
        }
    }
}

/// Expected fraction of experts that are activated if each token chooses an expert with `probability`.
pub(super) fn activated(probability: f64, tokens: f64) -> f64 {
    1.0 - (1.0 - probability).powf(tokens)
}

/// Expected maximum of normally distributed counts over `groups` groups (Harter 1961, table 1), accurate within 0.08
/// standard deviations for 2 to 128 groups.
pub(super) fn fullest(groups: f64, mean: f64, variance: f64) -> f64 {
    let deviations = if groups > 1.0 { (2.0 * groups.ln()).sqrt() - 0.6 } else { 0.0 };
    mean + deviations.max(0.0) * variance.sqrt()
}
