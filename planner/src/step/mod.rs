//! The physical model: seconds of one step of a layout, and TTFT and TPOT from it.
//!
//! | module | what |
//! |---|---|
//! | `constants` | how far engines stay below the data sheet |
//! | `terms` | the parts of a step, with the source of each formula |
//!
//! Products take the longer of computing and reading (roofline), collectives a latency and bytes over bandwidth on
//! every level that they cross. [`predict`] is the one entry: everything above it (search, affinity, switching) calls
//! it or [`step`].

mod constants;
mod terms;
#[cfg(test)]
mod tests;

pub use constants::Constants;
use serde::Serialize;
pub use terms::{StepTerms, Term};

use crate::cluster::{Cluster, Group};
use crate::layout::Layout;
use crate::shape::{Dtype, ModelShape};

/// A shape on a cluster in a layout.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// The model.
    pub shape: &'a ModelShape,
    /// GPUs and links.
    pub cluster: &'a Cluster,
    /// The unit's degrees.
    pub layout: Layout,
    /// The engine's constants.
    pub constants: &'a Constants,
}

/// The work of one step of the whole unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// Sequences, of all attention-DP groups together, above 0.
    pub sequences: f64,
    /// Tokens that each of them adds: 1 in decoding, the prompt in prefill.
    pub tokens: f64,
    /// Tokens that each already has in the cache.
    pub cached: f64,
}

/// A load with a constant number of requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Load {
    /// Requests in flight, of the whole unit, above 0.
    pub concurrency: f64,
    /// Tokens of a prompt, mean.
    pub input_tokens: f64,
    /// Tokens of an answer, mean.
    pub output_tokens: f64,
}

/// What is predicted for a [`Load`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// Seconds from a request to its first token, without a queue.
    pub ttft: f64,
    /// Seconds from one token to the next, mean, with the prefills that come between.
    pub tpot: f64,
    /// The parts of a prefill of one prompt.
    pub prefill: StepTerms,
    /// The parts of a step of decoding.
    pub decode: StepTerms,
}

/// TTFT and TPOT of a target under a load.
///
/// TTFT is the prefill of one prompt and the engine's time before it. TPOT is a step of decoding all requests in
/// flight, halfway through their answers, and the part of the prefills of new requests that delays it: with C
/// requests in flight of N output tokens each, C / N prompts come with every step.
#[must_use]
pub fn predict(target: &Target<'_>, load: &Load) -> Prediction {
    let decode = step(target, &decoding(load.concurrency, load));
    let prefill = step(target, &prompts(1.0, load));
    let arrivals = load.concurrency / load.output_tokens.max(1.0);
    let delay = target.constants.prefill_interference * arrivals * prefill_occupancy(target, load);
    Prediction {
        ttft: target.constants.request_seconds + prefill.total(),
        tpot: decode.total() + delay,
        prefill,
        decode,
    }
}

/// Decoding of `sequences` halfway through their answers.
#[must_use]
pub fn decoding(sequences: f64, load: &Load) -> Work {
    Work { sequences, tokens: 1.0, cached: load.input_tokens + load.output_tokens / 2.0 }
}

/// Prefill of `sequences` prompts at once.
#[must_use]
pub fn prompts(sequences: f64, load: &Load) -> Work {
    Work { sequences, tokens: load.input_tokens.max(1.0), cached: 0.0 }
}

/// Seconds of the unit that one prompt costs where every attention-DP group prefills one at a time and stages work on
/// different prompts.
#[must_use]
pub fn prefill_occupancy(target: &Target<'_>, load: &Load) -> f64 {
    let groups = target.layout.attention_dp as f64;
    step(target, &prompts(groups, load)).total() / groups / target.layout.pipeline as f64
}

/// The parts of one step through all layers. With stages, `work` is split into as many micro-batches as there are
/// stages, and a token passes all of them.
#[must_use]
pub fn step(target: &Target<'_>, work: &Work) -> StepTerms {
    let layout = &target.layout;
    // A prompt is not split over stages; decoding sequences are.
    let batches = if work.tokens > 1.0 { 1.0 } else { layout.pipeline as f64 };
    let all = (work.sequences / batches).max(1.0);
    let rank = (all / layout.attention_dp as f64).ceil().max(1.0);
    let batch = Batch { sequences: rank, tokens: rank * work.tokens, unit_tokens: all * work.tokens };
    let mut terms = StepTerms::default();
    target.attention(work, batch, &mut terms);
    target.experts(batch, &mut terms);
    target.communication(batch, &mut terms);
    target.ends(batch, &mut terms);
    terms
}

/// One micro-batch.
#[derive(Clone, Copy)]
struct Batch {
    /// Sequences of the fullest attention group.
    sequences: f64,
    /// Tokens of the fullest attention group.
    tokens: f64,
    /// Tokens of all groups.
    unit_tokens: f64,
}

/// Shares of the GPU's peaks.
#[derive(Clone, Copy)]
struct Shares {
    flops: f64,
    bandwidth: f64,
}

impl Target<'_> {
    /// Of products with dense weights.
    fn dense_shares(&self) -> Shares {
        Shares { flops: self.constants.dense_flops_share, bandwidth: self.constants.weight_bandwidth_share }
    }

    /// The longer of computing and reading: `flops` with elements of `dtype`, `bytes` of weights, each at a share of
    /// the peak.
    fn product(&self, flops: f64, bytes: f64, dtype: Dtype, shares: Shares) -> f64 {
        let compute = flops / (self.cluster.gpu.flops(dtype) * shares.flops);
        compute.max(bytes / (self.cluster.gpu.hbm * shares.bandwidth))
    }

    fn attention(&self, work: &Work, batch: Batch, terms: &mut StepTerms) {
        let (shape, constants) = (self.shape, self.constants);
        let layers = shape.layers as f64;
        let tp = self.layout.attention_tp;
        let parameters = shape.attention.rank_parameters(shape.hidden, tp) as f64;
        let dense = shape.precision.dense;
        // Norms, residuals and rotations read and write the hidden states about ten times.
        let elementwise = batch.tokens * shape.hidden as f64 * 20.0;
        let bytes = parameters * dense.bytes() + elementwise;
        terms.attention_products =
            layers * self.product(2.0 * parameters * batch.tokens, bytes, dense, self.dense_shares());
        // A causal prompt sees half of itself on average.
        let seen = shape.seen_tokens(work.cached + work.tokens / 2.0);
        let own = shape.attention.heads().div_ceil(tp) as f64 / shape.attention.heads() as f64;
        let pairs = 2.0 * shape.attention.multiply_adds(work.tokens <= 1.0) as f64 * own;
        let compute = pairs * batch.tokens * seen / (self.cluster.gpu.bf16 * constants.attention_flops_share);
        let read = batch.sequences * shape.seen_tokens(work.cached + work.tokens) * shape.kv_bytes_per_layer(tp);
        terms.attention_core = layers * compute.max(read / (self.cluster.gpu.hbm * constants.cache_bandwidth_share));
    }

    fn experts(&self, batch: Batch, terms: &mut StepTerms) {
        let (shape, constants, layout) = (self.shape, self.constants, &self.layout);
        let moe = shape.moe_layers as f64;
        let (tp, ep) = (layout.expert_tp as f64, layout.expert_ep as f64);
        let busiest = batch.unit_tokens * shape.top_k as f64 / ep * constants.expert_load_max_over_mean;
        let parameters = shape.expert_parameters() as f64 / tp;
        let bytes = self.distinct_experts(batch.unit_tokens) * parameters * shape.precision.experts.bytes();
        let flops = 2.0 * parameters * busiest;
        let shares = Shares { flops: constants.expert_flops_share, bandwidth: constants.expert_bandwidth_share };
        terms.experts = moe * self.product(flops, bytes, shape.precision.experts, shares);
        let dense = shape.dense_parameters() as f64 / layout.attention_tp as f64;
        let bytes = dense * shape.precision.dense.bytes();
        terms.dense = self.product(2.0 * dense * batch.tokens, bytes, shape.precision.dense, self.dense_shares());
    }

    /// Experts of one rank that a step of `tokens` activates, expected where every set of k experts is equally likely.
    #[must_use]
    pub fn distinct_experts(&self, tokens: f64) -> f64 {
        let (experts, k) = (self.shape.experts as f64, self.shape.top_k as f64);
        experts / self.layout.expert_ep as f64 * (1.0 - (1.0 - k / experts).powf(tokens))
    }

    /// Attention's reduction, the way to the experts and back, and the sums over the ranks that share an expert.
    fn communication(&self, batch: Batch, terms: &mut StepTerms) {
        let (shape, layout, constants) = (self.shape, &self.layout, self.constants);
        let (layers, moe, hidden) = (shape.layers as f64, shape.moe_layers as f64, shape.hidden as f64);
        let (out, back) = (hidden * constants.dispatch_bytes, hidden * constants.combine_bytes);
        let span = |group| self.cluster.span(group).tuned(constants.link_bandwidth_share, constants.collective_seconds);
        let attention = span(Group { size: layout.attention_tp, stride: 1 });
        terms.attention_reduce = layers * attention.all_reduce(batch.tokens * back);

        // A token goes once to each group of ranks that has one of its experts; its attention ranks send a part each.
        let slice = batch.tokens * self.copies() / layout.attention_tp as f64;
        let exchange = span(layout.exchange_group());
        let exposed = 1.0 - constants.overlap_share.min(1.0);
        terms.dispatch = moe * exchange.all_to_all(slice * out) * exposed;
        terms.combine = moe * exchange.all_to_all(slice * back) * exposed;
        let shards = span(Group { size: layout.expert_tp, stride: 1 });
        let gathered = slice * layout.expert_tp as f64;
        let mut shared = 0.0;
        if layout.attention_dp > 1 {
            shared += shards.scatter(gathered * out) + shards.scatter(gathered * back);
        }
        if layout.attention_dp == 1 || layout.attention_tp > layout.expert_tp {
            // Ranks of one attention group have all its tokens, and host different experts or rows: their sums are
            // added up.
            shared += attention.all_reduce(batch.tokens * back);
        }
        terms.expert_shards = moe * shared;
        let hop = span(Group { size: layout.pipeline, stride: layout.stage() })
            .point_to_point(batch.tokens / layout.attention_tp as f64 * back);
        terms.pipeline = (layout.pipeline - 1) as f64 * hop;
    }

    /// Groups of ranks that a token's k experts lie on, expected.
    #[must_use]
    pub fn copies(&self) -> f64 {
        let groups = self.layout.expert_ep as f64;
        groups * (1.0 - (1.0 - 1.0 / groups).powf(self.shape.top_k as f64))
    }

    /// The output projection, and what steps and layers cost beyond all that.
    fn ends(&self, batch: Batch, terms: &mut StepTerms) {
        let (shape, constants) = (self.shape, self.constants);
        let parameters = (shape.vocab * shape.hidden) as f64 / self.layout.attention_tp as f64;
        let other = shape.precision.other;
        let flops = 2.0 * parameters * batch.sequences;
        terms.output = self.product(flops, parameters * other.bytes(), other, self.dense_shares());
        terms.overhead = shape.layers as f64 * constants.layer_seconds + constants.step_seconds;
    }
}
