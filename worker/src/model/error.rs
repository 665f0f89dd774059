//! Why a checkpoint cannot be served, in one sentence, before anything is served; and why a step was refused.

use std::path::{Path, PathBuf};

use semmoe_kernels::reshard::{MemoryFault, ReshardError};
use semmoe_tables::ConfigError;

use crate::ep::{ExpertLayout, UnitError};

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
    /// A file of the directory is not there.
    #[error("{} is missing: expected {expected}", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// The file that should be there.
        expected: &'static str,
    },
    /// A GPU that refuses, as it does when memory is short: the driver's own words.
    #[error("the GPU refused: {0}")]
    Gpu(String),
    /// Something that only the CPU computes.
    #[error("{0} cannot be had on a GPU: it is not built for --device cuda")]
    NotOnGpu(&'static str),
    /// Experts that stay where they were at the start.
    #[error("experts {0} cannot be switched while the unit runs")]
    FixedLayout(ExpertLayout),
    /// A JSON file is not valid.
    #[error("{} is not valid: {detail}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The problem: found and expected.
        detail: String,
    },
    /// An architecture that this worker does not know.
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
    /// A safetensors file that is cut short or damaged.
    #[error("{} is not a complete safetensors file: {detail}", path.display())]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// The problem.
        detail: String,
    },
    /// A tensor that the configuration requires is missing.
    #[error("{} has no tensor {tensor}, which config.json asks for", path.display())]
    MissingTensor {
        /// The checkpoint file or index.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor of another shape than the configuration's, or of an unsupported type.
    #[error("{}: tensor {tensor} has {problem}", path.display())]
    Tensor {
        /// The checkpoint file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape or type: found and expected.
        problem: String,
    },
    /// Experts that cannot be cut into so many slices.
    #[error("the intermediate width {width} of an expert cannot be cut into {ranks} even slices, one for each rank")]
    ExpertWidth {
        /// `moe_intermediate_size`, or the family's name for it.
        width: usize,
        /// Ranks of the unit.
        ranks: usize,
    },
    /// Experts that cannot be laid out.
    #[error("the experts cannot be laid out: {0}")]
    Experts(ReshardError),
    /// Experts that cannot be written to their place.
    #[error(transparent)]
    ExpertFault(MemoryFault),
    /// No memory for experts.
    #[error("no memory for the experts: {0}")]
    ExpertMemory(String),
    /// A limit on the memory for experts that is too low for streaming.
    #[error(
        "the experts of this rank take at least {least} bytes of memory with two layers of those that are streamed, \
         --expert-memory is {limit}"
    )]
    ExpertBudget {
        /// The limit.
        limit: u64,
        /// The least that would do.
        least: u64,
    },
    /// A file that experts are streamed from is another than at the start.
    #[error("{} was changed while experts are streamed from it: {detail}", path.display())]
    FileChanged {
        /// The file.
        path: PathBuf,
        /// The difference.
        detail: String,
    },
    /// Experts that are read again and again stay where they are.
    #[error("experts that are streamed (--expert-memory) cannot be switched while the unit runs")]
    StreamedExperts,
    /// A placement with more experts on a rank than it has slots.
    #[error(
        "the placement has {found} experts on a rank, the ranks were started with {limit} expert slots: expected --expert-slots {found}"
    )]
    ExpertSlots {
        /// Of the rank with the most.
        found: usize,
        /// Slots of every rank.
        limit: usize,
    },
    /// Heads that cannot be split over so many ranks.
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
        /// The numbers of ranks that would do.
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
    /// Of a file that cannot be read or mapped.
    pub(crate) fn io(path: &Path) -> impl Fn(std::io::Error) -> Self + '_ {
        move |source| Self::Io { path: path.to_owned(), source }
    }
}

/// Why a step did not happen.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// A rank failed: the unit cannot continue.
    #[error(transparent)]
    Transport(#[from] UnitError),
    /// An item that cannot be computed. Nothing was sent and no cache has changed: the rank must begin its step again
    /// without that item, because its peers may be waiting.
    #[error("item {item} of the step is refused: {detail}")]
    Item {
        /// Index into the step's items.
        item: usize,
        /// The problem: found and expected.
        detail: String,
    },
}
