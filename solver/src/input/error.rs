//! Why a problem cannot be solved or tables cannot be evaluated.

use std::path::PathBuf;

use semmoe_tables::{FormatError, ModelInfo, Profile, Trace};

/// The errors of [`solve`](crate::solve) and [`evaluate`](crate::evaluate).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SolveError {
    /// There is nothing to solve from or to evaluate on.
    #[error("the {what} holds no token with a known route, expected at least one")]
    NoTokens {
        /// "profile" or "trace".
        what: &'static str,
    },
    /// Attention tp labels tokens layer by layer, so each layer needs evidence.
    #[error(
        "the profile holds no known route in the model's layer {layer}, expected counts in every layer for attention tp"
    )]
    SilentLayer {
        /// The model's layer number.
        layer: u16,
    },
    /// Counting remote ranks needs to know which experts a token activates together.
    #[error(
        "the objective `ranks` needs a trace, found only a profile: its counts do not say which experts a token activates together"
    )]
    RanksNeedTrace,
    /// The groups cannot hold equally many experts.
    #[error(
        "{groups} groups do not divide {experts} experts evenly, expected one of {divisors:?}, or padding or redundant slots for what is left"
    )]
    GroupsDoNotDivide {
        /// Number of groups requested, G.
        groups: u16,
        /// N of the model.
        experts: u16,
        /// The valid values of G.
        divisors: Vec<u16>,
    },
    /// The groups cannot hold equally many slots.
    #[error(
        "{redundant} redundant slots do not give {groups} groups equally many of the {experts} + {redundant} slots, expected one of {valid:?} and so on, at most {most}"
    )]
    RedundantDoesNotDivide {
        /// Number of redundant slots requested, R.
        redundant: u16,
        /// N of the model.
        experts: u16,
        /// Number of groups, G.
        groups: u16,
        /// The R at which every group holds every expert.
        most: u32,
        /// The smallest valid values.
        valid: Vec<u32>,
    },
    /// Two options exclude each other.
    #[error("{one} cannot be combined with {other}: {why}")]
    Together {
        /// The first option, in words.
        one: &'static str,
        /// The second option.
        other: &'static str,
        /// The reason.
        why: &'static str,
    },
    /// An input belongs to another model, or to other groups.
    #[error("{what} has {found}, expected {expected}")]
    OtherShape {
        /// "the given placement", and so on.
        what: &'static str,
        /// Shape of the input, in words.
        found: String,
        /// The shape of the problem.
        expected: String,
    },
    /// Items that cannot be distributed in equal parts.
    #[error("{found} {what} cannot be dealt evenly {among}, expected one of {valid:?}")]
    NotEven {
        /// "nodes", "gating groups".
        what: &'static str,
        /// The number requested.
        found: u16,
        /// The recipients, in words.
        among: String,
        /// The valid numbers.
        valid: Vec<u16>,
    },
    /// An option outside its range.
    #[error("option `{option}` is {found}, expected {expected}")]
    BadOption {
        /// The field.
        option: &'static str,
        /// Value of the option.
        found: String,
        /// The valid values.
        expected: &'static str,
    },
    /// More than the exact arithmetic can represent, or the steps can compare.
    #[error("the input has {found} {what}, expected at most {limit}")]
    TooLarge {
        /// The quantity, such as "activations" or "experts of a layer".
        what: &'static str,
        /// The quantity found.
        found: u128,
        /// Maximum of the quantity.
        limit: u64,
    },
    /// The token strings come from another tokenizer.
    #[error("the tokenizer has SHA-256 {found}, but the profile's tokenizer has {expected}")]
    OtherTokenizer {
        /// Hash of the strings' tokenizer.
        found: String,
        /// Hash in the profile.
        expected: String,
    },
    /// The token strings exceed the vocabulary.
    #[error("the tokenizer has {found} tokens, expected at most the profile's {expected}")]
    TokenizerTooLarge {
        /// Number of strings given.
        found: usize,
        /// V of the profile.
        expected: u32,
    },
    /// The embeddings belong to another model.
    #[error("{} has embeddings for {found} tokens, expected at least the profile's {expected}", path.display())]
    TooFewEmbeddings {
        /// The file.
        path: PathBuf,
        /// V' of the checkpoint.
        found: usize,
        /// V of the profile.
        expected: u32,
    },
    /// The inputs belong to different models, or a file cannot be built.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A routing policy that cannot be constructed.
    #[error(transparent)]
    Policy(#[from] semmoe_routing::PolicyError),
}

/// Checks that `groups` divides `experts`.
pub(crate) fn check_groups(groups: u16, experts: u16) -> Result<(), SolveError> {
    if groups > 0 && experts.is_multiple_of(groups) {
        return Ok(());
    }
    let divisors = (1..=experts).filter(|groups| experts.is_multiple_of(*groups)).collect();
    Err(SolveError::GroupsDoNotDivide { groups, experts, divisors })
}

/// Maximum experts per layer. Steps compare pairs of them, so time and memory grow with the square; published models
/// have up to 512.
const MAX_EXPERTS: u64 = 4096;

/// Maximum size of an array of experts or tokens by groups, with values of up to 8 bytes: a small file can name many
/// layers and tokens. Published models have up to 50 million for 512 groups.
const MAX_VALUES: u64 = 1 << 28;

/// Checks that a model is small enough for the steps to compare and hold, with this number of groups.
pub(crate) fn check_size(model: &ModelInfo, groups: u16) -> Result<(), SolveError> {
    let (experts, groups) = (u64::from(model.num_experts), u64::from(groups));
    at_most(MAX_EXPERTS, "experts of a layer", experts)?;
    at_most(MAX_VALUES, "layers x experts x groups", model.layers() as u64 * experts * groups)?;
    at_most(MAX_VALUES, "tokens x groups", u64::from(model.vocab_size) * groups)
}

fn at_most(limit: u64, what: &'static str, found: u64) -> Result<(), SolveError> {
    if found <= limit { Ok(()) } else { Err(SolveError::TooLarge { what, found: found.into(), limit }) }
}

/// Checks that pairs of experts fit into memory, that the groups divide the experts, and that profile and trace belong
/// to one model.
pub(crate) fn check_input(profile: &Profile, trace: Option<&Trace>, groups: u16) -> Result<(), SolveError> {
    let model = profile.model();
    check_size(model, groups)?;
    let pairs = model.layers() as u64 * u64::from(model.num_experts).pow(2);
    at_most(MAX_VALUES, "layers x experts x experts", pairs)?;
    check_groups(groups, model.num_experts)?;
    trace.map_or(Ok(()), |trace| Ok(profile.model().check_compatible(trace.model())?))
}
