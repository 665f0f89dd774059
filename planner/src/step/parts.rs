//! The kernels and collectives in a step.

use super::{Batch, Part, StepTerms, Target, Timed, Work};
use crate::cluster::{Group, Kernel, Operator};
use crate::shape::{Attention, Dtype, Product};

impl Target<'_> {
    fn dense(&self, product: Product, dtype: Dtype, tokens: f64) -> Timed {
        self.kernel(&Kernel::Product { dtype, inputs: product.inputs, outputs: product.outputs }, tokens)
    }

    pub(super) fn attention(&self, work: &Work, batch: Batch, terms: &mut StepTerms) {
        let shape = self.shape;
        let layers = shape.layers as f64;
        let dense = shape.precision.dense;
        // Norms, residuals and rotary embeddings read and write the hidden states about ten times.
        let elementwise = batch.tokens * shape.hidden as f64 * 20.0;
        let elementwise = elementwise / (self.cluster.gpu.hbm * self.constants.weight_bandwidth_share);
        let products = shape.attention.products(shape.hidden, self.layout.attention_tp);
        let products: Timed = products.map(|product| self.dense(product, dense, batch.tokens)).sum();
        let products = Timed { seconds: products.seconds + elementwise, ..products };
        terms.set(Part::AttentionProducts, products * layers);
        terms.set(Part::AttentionCore, self.attention_core_of(work, batch) * layers);
    }

    fn attention_core_of(&self, work: &Work, batch: Batch) -> Timed {
        let (shape, tp) = (self.shape, self.layout.attention_tp);
        let dtype = shape.precision.cache;
        let heads = shape.attention.heads().div_ceil(tp);
        let decodes = work.tokens <= 1.0;
        let (kv_heads, head_dim) = match shape.attention {
            Attention::Grouped { kv_heads, head_dim, .. } => (kv_heads.div_ceil(tp), head_dim),
            Attention::Latent { kv_rank, rope_dim, .. } if decodes => (1, kv_rank + rope_dim),
            Attention::Latent { nope_dim, rope_dim, .. } => (heads, nope_dim + rope_dim),
        };
        if !decodes {
            let one = self.kernel(&Kernel::Prefill { dtype, heads, kv_heads, head_dim }, work.tokens);
            // On average, a token of a causal prompt attends to half of the prompt; windows and cached tokens change
            // this.
            let seen = shape.seen_tokens(work.cached + work.tokens / 2.0) / (work.tokens / 2.0);
            return one * (batch.sequences * seen);
        }
        let context = shape.seen_tokens(work.cached + work.tokens).ceil() as u64;
        self.kernel(&Kernel::Decode { dtype, heads, kv_heads, head_dim, context }, batch.sequences)
    }

    pub(super) fn experts(&self, batch: Batch, terms: &mut StepTerms) {
        let (shape, layout) = (self.shape, &self.layout);
        let routed = Kernel::Experts {
            dtype: shape.precision.experts,
            hidden: shape.hidden,
            width: shape.expert_width.div_ceil(layout.expert_tp),
            experts: shape.experts,
            local: shape.experts.div_ceil(layout.expert_ep),
            top_k: shape.top_k,
        };
        if shape.moe_layers > 0 {
            terms.set(Part::Experts, self.kernel(&routed, batch.unit_tokens) * shape.moe_layers as f64);
        }
        let dense_layers = shape.layers - shape.moe_layers;
        let widths = [(shape.moe_layers, shape.shared_width), (dense_layers, shape.dense_width)];
        let mlp = |(layers, width): (u64, u64)| {
            let own = width.div_ceil(layout.attention_tp);
            let up = Product { inputs: shape.hidden, outputs: 2 * own };
            let down = Product { inputs: own, outputs: shape.hidden };
            [up, down].map(|product| self.dense(product, shape.precision.dense, batch.tokens) * layers as f64)
        };
        let dense = widths.into_iter().filter(|(layers, width)| layers * width > 0).flat_map(mlp);
        terms.set(Part::Dense, dense.sum());
    }

    /// Adds attention's reduction, dispatch and combine, and the sums over ranks that share an expert.
    pub(super) fn communication(&self, batch: Batch, terms: &mut StepTerms) {
        let (shape, layout, constants) = (self.shape, &self.layout, self.constants);
        let (layers, moe, hidden) = (shape.layers as f64, shape.moe_layers as f64, shape.hidden as f64);
        let (out, back) = (hidden * constants.dispatch_bytes, hidden * constants.combine_bytes);
        let span = |group| self.cluster.span(group).tuned(constants.link_bandwidth_share, constants.collective_seconds);
        let timed = |seconds, measured| Timed { seconds, measured };
        let attention = span(Group { size: layout.attention_tp, stride: 1 });
        let reduce = timed(attention.all_reduce(batch.tokens * back), attention.is_measured(Operator::AllReduce));
        terms.set(Part::AttentionReduce, reduce * layers);

        // A token is sent once to each rank group that has one of its experts; each of its attention ranks sends a
        // part.
        let slice = batch.tokens * self.copies() / layout.attention_tp as f64;
        // With scattered rows, a rank sends its rows like an attention-DP group of a single rank.
        let scattered = constants.scattered_rows && layout.attention_tp > 1;
        let exchange = span(match scattered {
            true => Group { size: layout.stage().min(layout.expert_ep), stride: layout.expert_tp },
            false => layout.exchange_group(),
        });
        let exposed = moe * (1.0 - constants.overlap_share.min(1.0));
        let exchanged = exchange.is_measured(Operator::AllToAll);
        terms.set(Part::Dispatch, timed(exchange.all_to_all(slice * out), exchanged) * exposed);
        terms.set(Part::Combine, timed(exchange.all_to_all(slice * back), exchanged) * exposed);
        let shards = span(Group { size: layout.expert_tp, stride: 1 });
        let gathered = slice * layout.expert_tp as f64;
        let mut shared = timed(0.0, false);
        if layout.attention_dp > 1 || scattered {
            let there_and_back = shards.scatter(gathered * out) + shards.scatter(gathered * back);
            shared = shared + timed(there_and_back, shards.is_measured(Operator::Scatter));
        }
        if !scattered && (layout.attention_dp == 1 || layout.attention_tp > layout.expert_tp) {
            // All ranks of an attention group have all of its tokens, but host different experts or rows, so their sums
            // are all-reduced.
            shared = shared + reduce;
        }
        // Dense layers are divided in the same way as attention.
        terms.set(Part::ExpertShards, shared * moe + reduce * (layers - moe));
        let hop = span(Group { size: layout.pipeline, stride: layout.stage() });
        let seconds = hop.point_to_point(batch.tokens / layout.attention_tp as f64 * back);
        let hop = timed(seconds, hop.is_measured(Operator::PointToPoint));
        terms.set(Part::Pipeline, hop * (layout.pipeline - 1) as f64);
    }

    /// Expected number of rank groups that host any of a token's k experts.
    pub fn copies(&self) -> f64 {
        let groups = self.layout.expert_ep as f64;
        groups * (1.0 - (1.0 - 1.0 / groups).powf(self.shape.top_k as f64))
    }

    /// Adds the output projection and the remaining costs of steps and layers.
    pub(super) fn ends(&self, batch: Batch, terms: &mut StepTerms) {
        let (shape, constants) = (self.shape, self.constants);
        let outputs = shape.vocab.div_ceil(self.layout.attention_tp);
        let output = Product { inputs: shape.hidden, outputs };
        // Only the last stage has the output projection and the end of a step; each micro-batch waits there for the
        // others.
        terms.set(Part::Output, self.dense(output, shape.precision.other, batch.sequences) * batch.in_flight);
        let layers =
            shape.layers as f64 * constants.layer_seconds + shape.moe_layers as f64 * constants.moe_layer_seconds;
        let end = constants.step_seconds + batch.sequences * constants.sequence_seconds;
        let seconds = layers + end * batch.in_flight;
        terms.set(Part::Overhead, Timed { seconds, measured: false });
    }
}
