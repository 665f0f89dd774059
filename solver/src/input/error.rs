//! Errors from solving a problem or evaluating tables.

use std::path::PathBuf;

use semmoe_tables::{FormatError, ModelInfo, Profile, Trace};

/// The errors that [`solve`](crate::solve) and [`evaluate`](crate::evaluate) return.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SolveError {
    /// The input has no tokens to solve or evaluate on.
    #[error("the {what} contains no token with a known route, expected at least one")]
    NoTokens {
        /// "profile" or "trace".
        what: &'static str,
    },
    /// Attention tp labels tokens layer by layer, so every layer needs counts.
    #[error(
        "the profile contains no known route in the model's layer {layer}; attention tp requires counts in every layer"
    )]
    SilentLayer {
        /// The model's layer number.
        layer: u16,
    },
    /// Counting remote ranks requires knowing which experts a token activates together.
    #[error(
        "the objective `ranks` needs a trace: a profile's counts do not show which experts a token activates together"
    )]
    RanksNeedTrace,
    /// The experts cannot be divided evenly among the groups.
    #[error(
        "{groups} groups do not divide {experts} experts evenly, expected one of {divisors:?}, or padding or redundant slots for the remainder"
    )]
    GroupsDoNotDivide {
        /// Number of groups requested, G.
        groups: u16,
        /// N of the model.
        experts: u16,
        /// The valid values of G.
        divisors: Vec<u16>,
    },
    /// The slots cannot be divided evenly among the groups.
    #[error(
        "{experts} + {redundant} slots cannot be divided evenly among {groups} groups; the number of redundant slots must be one of {valid:?} and so on, at most {most}"
    )]
    RedundantDoesNotDivide {
        /// Number of redundant slots requested, R.
        redundant: u16,
        /// N of the model.
        experts: u16,
        /// Number of groups, G.
        groups: u16,
        /// The largest valid R: every group then holds every expert.
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
    /// An input's model or number of groups does not match the problem.
    #[error("{what} has {found}, expected {expected}")]
    OtherShape {
        /// The input, such as "the given placement".
        what: &'static str,
        /// Shape of the input, in words.
        found: String,
        /// The shape of the problem.
        expected: String,
    },
    /// Items that cannot be divided into equal parts.
    #[error("{found} {what} cannot be divided evenly {among}, expected one of {valid:?}")]
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
    /// An option is out of range.
    #[error("option `{option}` is {found}, expected {expected}")]
    BadOption {
        /// The field.
        option: &'static str,
        /// Value of the option.
        found: String,
        /// The valid values.
        expected: &'static str,
    },
    /// The input exceeds the range of the exact arithmetic, or the size that the steps can handle.
    #[error("the input has {found} {what}, expected at most {limit}")]
    TooLarge {
        /// The quantity, such as "activations" or "experts per layer".
        what: &'static str,
        /// The quantity found.
        found: u128,
        /// Maximum of the quantity.
        limit: u64,
    },
    /// The token strings come from a different tokenizer.
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
    /// The embeddings belong to a different model.
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
    /// A routing policy cannot be constructed.
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

/// Maximum experts per layer. Steps compare pairs of experts, so time and memory grow quadratically; published models
/// have up to 512.
const MAX_EXPERTS: u64 = 4096;

/// Maximum number of values, of up to 8 bytes each, in an array of experts or tokens by groups: even a small file can
/// declare many layers and tokens. Published models have up to 50 million values for 512 groups.
const MAX_VALUES: u64 = 1 << 28;

/// Checks that the model, with this number of groups, fits the time and memory limits of the steps.
pub(crate) fn check_size(model: &ModelInfo, groups: u16) -> Result<(), SolveError> {
    let (experts, groups) = (u64::from(model.num_experts), u64::from(groups));
    at_most(MAX_EXPERTS, "experts per layer", experts)?;
    at_most(MAX_VALUES, "layers x experts x groups", model.layers() as u64 * experts * groups)?;
    at_most(MAX_VALUES, "tokens x groups", u64::from(model.vocab_size) * groups)
}

fn at_most(limit: u64, what: &'static str, found: u64) -> Result<(), SolveError> {
    if found <= limit { Ok(()) } else { Err(SolveError::TooLarge { what, found: found.into(), limit }) }
}

/// Checks that pairs of experts fit into memory, that the groups divide the experts, and that profile and trace belong
/// to the same model.
pub(crate) fn check_input(profile: &Profile, trace: Option<&Trace>, groups: u16) -> Result<(), SolveError> {
    let model = profile.model();
    check_size(model, groups)?;
    let pairs = model.layers() as u64 * u64::from(model.num_experts).pow(2);
    at_most(MAX_VALUES, "layers x experts x experts", pairs)?;
    check_groups(groups, model.num_experts)?;
    trace.map_or(Ok(()), |trace| Ok(profile.model().check_compatible(trace.model())?))
}
