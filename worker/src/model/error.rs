//! Errors that prevent a checkpoint from being served, each one sentence and reported before serving starts, and errors
//! that reject a step.

use std::path::{Path, PathBuf};

use semmoe_kernels::reshard::{MemoryFault, ReshardError};
use semmoe_tables::ConfigError;

use crate::ep::{ExpertLayout, RankGroups, UnitError};

/// The attention kind that is not supported on GPUs.
pub(crate) const LATENT: &str = "latent attention (MLA)";
/// Expert streaming, which is not supported on GPUs.
#[cfg(feature = "gpu")]
pub(super) const STREAMED: &str = "experts streamed from the checkpoint";

/// An error while loading a model or switching it to another layout.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file cannot be read or mapped.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A file is missing from the directory.
    #[error("{} is missing: expected {expected}", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// A description of the expected file.
        expected: &'static str,
    },
    /// A GPU error as reported by the driver, such as out of memory.
    #[error("the GPU failed: {0}")]
    #[cfg(feature = "gpu")]
    Gpu(#[source] semmoe_kernels_cuda::GpuError),
    /// A feature that is implemented only on the CPU.
    #[error("{0} is not supported on a GPU (--device cuda)")]
    NotOnGpu(&'static str),
    /// The expert layout does not allow experts to move after startup.
    #[error(
        "experts {0} cannot be switched while the unit is running: the ranks were not started with --switch-hybrid"
    )]
    FixedLayout(ExpertLayout),
    /// The unit was started without support for these groups.
    #[error("the ranks were started without {groups} rank groups: expected --switch-groups {}", groups.groups)]
    Groups {
        /// The groups.
        groups: RankGroups,
    },
    /// A JSON file is invalid.
    #[error("{} is not valid: {detail}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The problem, with the values found and expected.
        detail: String,
    },
    /// An unsupported architecture.
    #[error("{} specifies the architecture {found}; this worker supports {known}", path.display())]
    Architecture {
        /// The configuration file.
        path: PathBuf,
        /// The architecture that the file specifies.
        found: String,
        /// The supported ones.
        known: String,
    },
    /// A configuration value is invalid or unsupported by this worker.
    #[error(transparent)]
    Config(ConfigError),
    /// A safetensors file is truncated or corrupt.
    #[error("{} is not a complete safetensors file: {detail}", path.display())]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// The problem.
        detail: String,
    },
    /// A tensor that the configuration requires is missing.
    #[error("{} has no tensor {tensor}, which config.json requires", path.display())]
    MissingTensor {
        /// The checkpoint file or index.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor's shape does not match the configuration, or its type is unsupported.
    #[error("{}: tensor {tensor} has {problem}", path.display())]
    Tensor {
        /// The checkpoint file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The mismatch in shape or type, with the values found and expected.
        problem: String,
    },
    /// Experts cannot be divided into this many slices.
    #[error("the expert intermediate width {width} cannot be divided into {ranks} equal slices, one per rank")]
    ExpertWidth {
        /// `moe_intermediate_size`, or the family's name for it.
        width: usize,
        /// Ranks of the unit.
        ranks: usize,
    },
    /// The experts cannot be placed.
    #[error("the experts cannot be placed: {0}")]
    Experts(ReshardError),
    /// An expert could not be written to its slot.
    #[error(transparent)]
    ExpertFault(MemoryFault),
    /// Memory for the experts could not be allocated.
    #[error("cannot set up memory for the experts: {0}")]
    ExpertMemory(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The thread that reads streamed experts has panicked.
    #[error("the thread that reads streamed experts has exited")]
    ReaderGone,
    /// The memory limit for experts is too low, even with streaming.
    #[error(
        "this rank's experts need at least {least} bytes of memory, including two layers of streamed experts, but \
         --expert-memory is {limit}"
    )]
    ExpertBudget {
        /// The limit.
        limit: u64,
        /// The minimum required.
        least: u64,
    },
    /// A file that experts are streamed from has changed since startup.
    #[error("{} changed while experts were being streamed from it: {detail}", path.display())]
    FileChanged {
        /// The file.
        path: PathBuf,
        /// The difference.
        detail: String,
    },
    /// Streamed experts cannot be moved.
    #[error("streamed experts (--expert-memory) cannot be switched while the unit is running")]
    StreamedExperts,
    /// The placement assigns more experts to a rank than it has slots.
    #[error(
        "the placement assigns {found} experts to a rank, but the ranks were started with {limit} expert slots: expected --expert-slots {found}"
    )]
    ExpertSlots {
        /// The maximum number of experts on any rank.
        found: usize,
        /// Slots per rank.
        limit: usize,
    },
    /// The heads cannot be split over this many ranks.
    #[error(
        "attention tp cannot split {heads} query heads and {kv_heads} key-value heads over {ranks} ranks, expected one of \
         {possible}"
    )]
    Heads {
        /// Query heads.
        heads: usize,
        /// Number of key-value heads.
        kv_heads: usize,
        /// Ranks of the unit.
        ranks: usize,
        /// The rank counts that would work.
        possible: String,
    },
    /// The placement was made for another model or unit.
    #[error("the placement has {found} {field}, but the {of} has {expected}")]
    Placement {
        /// The property that differs.
        field: &'static str,
        /// The placement's value.
        found: usize,
        /// Model or unit.
        of: &'static str,
        /// Its value.
        expected: usize,
    },
}

impl ModelError {
    /// Returns a function that wraps an I/O error on the file.
    pub(crate) fn io(path: &Path) -> impl Fn(std::io::Error) -> Self + '_ {
        move |source| Self::Io { path: path.to_owned(), source }
    }
}

/// Errors that make a step fail.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// A rank failed, so the unit cannot continue.
    #[error(transparent)]
    Transport(#[from] UnitError),
    /// An item is invalid. Nothing was sent and no cache has changed, but peers may be waiting, so the rank must retry
    /// its step without the item.
    #[error("item {item} of the step is invalid: {source}")]
    Item {
        /// Index into the step's items.
        item: usize,
        /// The problem.
        source: ItemError,
    },
}

/// An invalid item of a step.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ItemError {
    /// The item has no tokens.
    #[error("it has no tokens, expected at least one")]
    NoTokens,
    /// A token id is outside the vocabulary.
    #[error("token id {found} is outside the vocabulary of {limit} tokens")]
    Token {
        /// The token.
        found: u32,
        /// Vocabulary size.
        limit: usize,
    },
    /// The item exceeds the maximum sequence length.
    #[error("it has {found} tokens, but its sequence has room for only {limit} more")]
    Length {
        /// Tokens in the item.
        found: usize,
        /// Tokens that the sequence still has room for.
        limit: usize,
    },
    /// No free page is left.
    #[error("no free KV cache page is left for it")]
    NoPage,
}
