//! Runs the CUDA sources on the CPU: for tests and dry runs, not for speed.
//!
//! A C++ compiler builds the GPU's sources behind a small header (`shim.h`). One fiber per CUDA thread, all on one OS
//! thread, scheduled by a seeded generator: equal seeds give identical runs. Ranks are streams of steps.
//! kernels/README.md says what is modelled and what is not.

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
