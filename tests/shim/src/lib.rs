//! Runs the CUDA sources on the CPU: for tests and dry runs, not for speed.
//!
//! A C++ compiler builds the very sources that a GPU gets, behind a small header (`shim.h`). One fiber per CUDA thread,
//! all on one OS thread, chosen by a seeded generator: the same seed gives the same run. Ranks are streams of steps.
//! kernels/README.md says what this models and what it does not.

mod build;
mod error;
mod group;
mod memory;
mod run;
mod stream;

pub use build::{Compiler, Sanitize, Shim};
pub use error::ShimError;
pub use group::Group;
pub use memory::HostBuffer;
pub use run::{Mutant, Step, StreamEnd};
pub use stream::ShimStream;
