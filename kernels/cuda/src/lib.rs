//! The collectives as CUDA kernels: their sources, calls that are checked before any launch, and the reports of kernels
//! that stop.
//!
//! Nothing here needs a GPU, a driver or a compiler: `semmoe-kernels-shim` runs these launches on the CPU.
//! kernels/README.md explains the kernels.

#[cfg(any(test, feature = "cuda"))]
mod cached;
mod calls;
#[cfg(feature = "nvrtc")]
mod compile;
pub mod compute;
#[cfg(feature = "cuda")]
pub mod driver;
mod error;
mod exchange;
pub mod hosts;
mod image;
mod launch;
mod params;
#[cfg(any(test, feature = "cuda"))]
mod repeats;
mod reshard;
mod runner;
mod source;
mod team;
pub mod unit;
pub mod vmm;

pub use calls::{
    AllReduce, Allgather, Argsort, ELEMENT_ALIGNMENT, OwnSplit, ReduceScatter, ReduceScatterNorm, RowOrder, Rows,
    Shuffle, Split,
};
#[cfg(feature = "nvrtc")]
pub use compile::{CompileError, Compiled, KernelUse, compile, compile_with_spills};
pub use error::{GpuError, LaunchError, Stopped};
pub use exchange::{Combine, Dispatch, MAX_TOP_K, Received};
pub use image::{Target, embedded};
pub use launch::{Grid, Launch};
pub use params::{
    COLLECTIVE_THREADS, MAX_BLOCKS, MAX_LOCAL, MAX_NORM_HIDDEN, MAX_RANKS, NORM_THREADS, SIGNAL_BYTES, SORT_THREADS,
};
pub use reshard::{DeviceMove, MOVE_BYTES, Reshard};
pub use runner::{Accelerator, Runner};
pub use source::{HEADERS, SOURCES, Source, kernels_of, sources_for};
pub use team::{Buffer, Team};
