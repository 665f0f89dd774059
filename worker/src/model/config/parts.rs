//! The variants of the transformer block: a model's kinds of attention, router and shared expert.

/// The attention kind of a layer.
#[derive(Clone, PartialEq, Debug)]
pub enum AttentionKind {
    /// Key-value heads, each shared by a group of query heads.
    Grouped(GroupedAttention),
    /// One latent vector and one rotated key per token, shared by all heads (MLA, DeepSeek-V2 section 2.1).
    Latent(LatentAttention),
}

/// Grouped-query attention.
#[derive(Clone, PartialEq, Debug)]
pub struct GroupedAttention {
    /// Number of key-value heads; divides the number of query heads.
    pub kv_heads: usize,
    /// Width of one head; even.
    pub head_dim: usize,
    /// How queries and keys are normalised.
    pub norms: HeadNormKind,
    /// Whether the query, key and value projections have a bias.
    pub qkv_bias: bool,
    /// Queries, keys and values are clipped to this magnitude after normalisation.
    pub clip: Option<f32>,
}

/// How queries and keys are normalised before rotation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeadNormKind {
    /// Not normalised.
    None,
    /// Each head separately.
    PerHead,
    /// All heads of a token together.
    Whole,
}

/// Multi-head latent attention. The cache stores the latent vector and the rotated key instead of per-head keys and
/// values.
#[derive(Clone, PartialEq, Debug)]
pub struct LatentAttention {
    /// Width of the low-rank query projection, if there is one.
    pub query_rank: Option<usize>,
    /// Width of the latent vector.
    pub kv_rank: usize,
    /// Width of the unrotated part of a head's query and key.
    pub nope_dim: usize,
    /// Width of the rotated part of a head's query and key; even.
    pub rope_dim: usize,
    /// Width of a head's value.
    pub value_dim: usize,
}

impl LatentAttention {
    /// Number of elements in one head's query.
    pub fn query_width(&self) -> usize {
        self.nope_dim + self.rope_dim
    }
}

/// How router logits determine experts and their weights.
#[derive(Clone, PartialEq, Debug)]
pub struct Router {
    /// How logits are converted to scores.
    pub scoring: Scoring,
    /// Limits selection to experts in the best groups.
    pub groups: Option<GroupLimit>,
    /// Whether the k weights are scaled to sum to 1.
    pub normalise: bool,
    /// Scale factor applied to every weight after normalisation.
    pub scale: f32,
}

/// How router logits are converted to scores.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scoring {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid; a per-expert correction is added for selection only (DeepSeek-V3 section 2.1.2).
    CorrectedSigmoid,
}

/// Group-limited expert selection (DeepSeek-V2 section 2.2.2). Groups are of equal size and consist of experts with
/// consecutive ids.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupLimit {
    /// Number of groups; divides N.
    pub groups: usize,
    /// Number of groups from which experts are selected; together they have at least k experts.
    pub kept: usize,
    /// How groups are scored.
    pub by: GroupScore,
}

/// How a group of experts is scored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GroupScore {
    /// By the best score in the group (`group_limited_greedy`).
    Best,
    /// By the sum of the two best scores in the group (`noaux_tc`).
    TwoBest,
}

/// An expert that processes every token, computed by the token's own rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SharedExpert {
    /// Intermediate width. Several shared experts are treated as a single wider one.
    pub width: usize,
    /// Whether the expert's output is weighted by a sigmoid gate.
    pub gated: bool,
}

/// The rotary embedding.
#[derive(Clone, PartialEq, Debug)]
pub struct Rope {
    /// Base of the angles.
    pub theta: f64,
    /// How a head's elements are paired.
    pub layout: RopeLayout,
    /// YaRN extension to longer contexts.
    pub yarn: Option<Yarn>,
}

/// How a head's elements are paired for rotation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RopeLayout {
    /// Element i is paired with element i + d/2.
    Halves,
    /// Element 2i is paired with element 2i + 1.
    Pairs,
}

/// YaRN (Peng et al. 2023, section 3): low frequencies are divided by a factor, high ones are left unscaled, and a ramp
/// interpolates between them.
#[derive(Clone, PartialEq, Debug)]
pub struct Yarn {
    /// Ratio of the extended context length to the original one; at least 1.
    pub factor: f64,
    /// The original context length, used in training.
    pub original_positions: f64,
    /// Frequencies that complete more rotations than this over the original context are left unscaled.
    pub beta_fast: f64,
    /// Frequencies that complete fewer rotations than this over the original context are divided by `factor`.
    pub beta_slow: f64,
    /// Whether the ends of the ramp are rounded to integers.
    pub truncate: bool,
    /// Scale factor for cosines and sines.
    pub attention_factor: f64,
    /// Scale factor for latent attention scores.
    pub score_factor: f64,
}
