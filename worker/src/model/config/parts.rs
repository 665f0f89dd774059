//! The variants of the single transformer block: the kinds of attention, router and shared expert of a model.

/// The kind of a layer's attention.
#[derive(Clone, PartialEq, Debug)]
pub enum AttentionKind {
    /// Heads of keys and values, each shared by a group of query heads.
    Grouped(GroupedAttention),
    /// One latent vector and one rotated key per token, shared by all heads (MLA, DeepSeek-V2 section 2.1).
    Latent(LatentAttention),
}

/// Grouped-query attention.
#[derive(Clone, PartialEq, Debug)]
pub struct GroupedAttention {
    /// Key-value heads; divides the heads.
    pub kv_heads: usize,
    /// Width of one head; even.
    pub head_dim: usize,
    /// Where queries and keys are normed.
    pub norms: HeadNormKind,
    /// Whether the projections of queries, keys and values have a bias.
    pub qkv_bias: bool,
    /// Queries, keys and values are clipped to this magnitude after their norms.
    pub clip: Option<f32>,
}

/// Where queries and keys are normed, before they are rotated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeadNormKind {
    /// Nowhere.
    None,
    /// Each head by itself.
    PerHead,
    /// All heads of a token together.
    Whole,
}

/// Multi-head latent attention. The cache keeps the latent vector and the rotated key, not the heads' keys and values.
#[derive(Clone, PartialEq, Debug)]
pub struct LatentAttention {
    /// Width of the bottleneck of queries, if they have one.
    pub query_rank: Option<usize>,
    /// Width of the latent vector.
    pub kv_rank: usize,
    /// Part of a head's query and key that is not rotated.
    pub nope_dim: usize,
    /// Part that is rotated; even.
    pub rope_dim: usize,
    /// Width of a head's value.
    pub value_dim: usize,
}

impl LatentAttention {
    /// Elements of one head's query.
    pub fn query_width(&self) -> usize {
        self.nope_dim + self.rope_dim
    }
}

/// How the router's logits determine experts and weights.
#[derive(Clone, PartialEq, Debug)]
pub struct Router {
    /// How a logit becomes a score.
    pub scoring: Scoring,
    /// Limits the choice to experts of the best groups.
    pub groups: Option<GroupLimit>,
    /// Whether the k weights are scaled to sum to 1.
    pub normalise: bool,
    /// Factor of every weight, applied afterwards.
    pub scale: f32,
}

/// How a router's logit becomes a score.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scoring {
    /// The softmax over all experts.
    Softmax,
    /// The sigmoid; a correction per expert is added only for the choice (DeepSeek-V3 section 2.1.2).
    CorrectedSigmoid,
}

/// Group-limited choice (DeepSeek-V2 section 2.2.2): groups of the same number of experts with consecutive ids.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupLimit {
    /// Groups; divides N.
    pub groups: usize,
    /// Groups to choose from; together they have at least k experts.
    pub kept: usize,
    /// How groups are scored.
    pub by: GroupScore,
}

/// The score of a group of experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GroupScore {
    /// The score of its best expert (`group_limited_greedy`).
    Best,
    /// The sum of its two best (`noaux_tc`).
    TwoBest,
}

/// An expert that every token takes, computed by the token's own rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SharedExpert {
    /// Its width; several shared experts count as one.
    pub width: usize,
    /// Whether its result is weighted by a sigmoid gate.
    pub gated: bool,
}

/// The rotary embedding.
#[derive(Clone, PartialEq, Debug)]
pub struct Rope {
    /// Base of the angles.
    pub theta: f64,
    /// Which elements are rotated together.
    pub layout: RopeLayout,
    /// The extension to longer contexts.
    pub yarn: Option<Yarn>,
}

/// Which elements of a head are rotated together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RopeLayout {
    /// Element i with element i + d/2.
    Halves,
    /// Element 2i with element 2i + 1.
    Pairs,
}

/// YaRN (Peng et al. 2023, section 3): low frequencies are divided by a factor, high ones are left unscaled, and a ramp
/// interpolates between them.
#[derive(Clone, PartialEq, Debug)]
pub struct Yarn {
    /// Ratio of the context to that in training; at least 1.
    pub factor: f64,
    /// Context length in training.
    pub original_positions: f64,
    /// Frequencies that complete more rotations than this over the original context are left unscaled.
    pub beta_fast: f64,
    /// Frequencies that complete fewer rotations than this are divided by the factor.
    pub beta_slow: f64,
    /// Whether the ends of the ramp are rounded to integers.
    pub truncate: bool,
    /// Factor of cosines and sines.
    pub attention_factor: f64,
    /// Factor of the scores of latent attention.
    pub score_factor: f64,
}
