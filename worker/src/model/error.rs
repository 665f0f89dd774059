//! Reasons why a checkpoint cannot be served, one sentence each and before anything is served; and why a step was
//! refused.

use std::path::{Path, PathBuf};

use semmoe_kernels::reshard::{MemoryFault, ReshardError};
use semmoe_tables::ConfigError;

use crate::ep::{ExpertLayout, RankGroups, UnitError};

/// The kind of attention that GPUs do not support.
pub(crate) const LATENT: &str = "latent attention (MLA)";
/// GPUs do not support reading experts ahead of their layer.
#[cfg(feature = "gpu")]
pub(super) const STREAMED: &str = "experts streamed from the checkpoint";

/// A model directory that cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file cannot be read or mapped.
    #[error("{} cannot be read: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A file of the directory is missing.
    #[error("{} is missing: expected {expected}", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// The file that should be there.
        expected: &'static str,
    },
    /// A GPU error, such as a lack of memory, in the driver's words.
    #[error("the GPU failed: {0}")]
    #[cfg(feature = "gpu")]
    Gpu(#[source] semmoe_kernels_cuda::GpuError),
    /// Something that is implemented only on the CPU.
    #[error("{0} is not supported on a GPU (--device cuda)")]
    NotOnGpu(&'static str),
    /// Experts that cannot be moved after the start.
    #[error("experts {0} cannot be switched while the unit runs")]
    FixedLayout(ExpertLayout),
    /// Groups that the unit was not started with.
    #[error("the ranks were not started with groups of {groups}: expected --switch-groups {}", groups.groups)]
    Groups {
        /// The groups.
        groups: RankGroups,
    },
    /// A JSON file is not valid.
    #[error("{} is not valid: {detail}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The problem: found and expected.
        detail: String,
    },
    /// An unsupported architecture.
    #[error("{} names the architecture {found}; this worker runs {known}", path.display())]
    Architecture {
        /// The configuration file.
        path: PathBuf,
        /// The architecture of the file.
        found: String,
        /// The supported ones.
        known: String,
    },
    /// A configuration value that is invalid, or that this worker does not support.
    #[error(transparent)]
    Config(ConfigError),
    /// A safetensors file that is truncated or damaged.
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
    /// A tensor whose shape differs from the configuration's, or whose type is unsupported.
    #[error("{}: tensor {tensor} has {problem}", path.display())]
    Tensor {
        /// The checkpoint file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape or type: found and expected.
        problem: String,
    },
    /// Experts that cannot be cut into this many slices.
    #[error("the intermediate width {width} of an expert cannot be cut into {ranks} even slices, one for each rank")]
    ExpertWidth {
        /// `moe_intermediate_size`, or the family's name for it.
        width: usize,
        /// Ranks of the unit.
        ranks: usize,
    },
    /// Experts that cannot be placed.
    #[error("the experts cannot be placed: {0}")]
    Experts(ReshardError),
    /// Experts that cannot be written to their slots.
    #[error(transparent)]
    ExpertFault(MemoryFault),
    /// No memory for experts.
    #[error("no memory for the experts: {0}")]
    ExpertMemory(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The thread that reads streamed experts has panicked.
    #[error("the thread that reads its experts has exited")]
    ReaderGone,
    /// A memory limit for experts that is too low for streaming.
    #[error(
        "this rank's experts need at least {least} bytes of memory, two layers of streamed ones included, but \
         --expert-memory is {limit}"
    )]
    ExpertBudget {
        /// The limit.
        limit: u64,
        /// The minimum required.
        least: u64,
    },
    /// A file that experts are streamed from has changed since the start.
    #[error("{} has changed while experts are streamed from it: {detail}", path.display())]
    FileChanged {
        /// The file.
        path: PathBuf,
        /// The difference.
        detail: String,
    },
    /// Streamed experts cannot be moved.
    #[error("streamed experts (--expert-memory) cannot be switched while the unit runs")]
    StreamedExperts,
    /// A placement with more experts on a rank than it has slots.
    #[error(
        "the placement has {found} experts on a rank, the ranks were started with {limit} expert slots: expected --expert-slots {found}"
    )]
    ExpertSlots {
        /// The maximum over the ranks.
        found: usize,
        /// Slots per rank.
        limit: usize,
    },
    /// Heads that cannot be split over this many ranks.
    #[error(
        "attention tp cannot split {heads} query heads and {kv_heads} key-value heads over {ranks} ranks, expected one of \
         {possible}"
    )]
    Heads {
        /// Query heads.
        heads: usize,
        /// Heads of keys and values.
        kv_heads: usize,
        /// Ranks of the unit.
        ranks: usize,
        /// The possible numbers of ranks.
        possible: String,
    },
    /// A placement for another model or another unit.
    #[error("the placement has {field} {found}, the {of} has {expected}")]
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
    /// A file that cannot be read or mapped.
    pub(crate) fn io(path: &Path) -> impl Fn(std::io::Error) -> Self + '_ {
        move |source| Self::Io { path: path.to_owned(), source }
    }
}

/// Reasons why a step was not run.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// A rank failed: the unit cannot continue.
    #[error(transparent)]
    Transport(#[from] UnitError),
    /// An invalid item. Nothing was sent and no cache has changed: the rank must restart its step without the item,
    /// because its peers may be waiting.
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
    /// It has no tokens.
    #[error("it has no tokens, expected at least one")]
    NoTokens,
    /// A token that the model does not know.
    #[error("token id {found}, expected below the vocabulary's {limit}")]
    Token {
        /// The token.
        found: u32,
        /// Tokens of the vocabulary.
        limit: usize,
    },
    /// More tokens than the sequence can take.
    #[error("{found} tokens, expected at most the {limit} that its sequence can still take")]
    Length {
        /// Tokens of the item.
        found: usize,
        /// Tokens that the sequence can take.
        limit: usize,
    },
    /// No page is left.
    #[error("no page of the key-value cache is left for it")]
    NoPage,
}
