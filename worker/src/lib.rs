//! One expert-parallel rank: loads a Hugging Face checkpoint, runs it together with its peers and serves HTTP.
//!
//! | module | what |
//! |---|---|
//! | [`model`] | the checkpoint and one step through its layers |
//! | [`ep`] | expert parallelism: transports, dispatch and combine, counters |
//! | `engine` | one rank's scheduler: continuous batching, sampling, stop conditions |
//! | `control` | rendezvous of the rank processes, and the links between rank 0 and the other ranks |
//! | `unit` | the whole unit as rank 0 sees it |
//! | `serve` | rank 0's HTTP server |
//! | `rank` | the life of a rank's process, from its arguments to its exit: [`run`] |
//! | `launch` | starting the ranks of a unit as child processes |
//! | `memory` | the memory available to this process |
//! | `threads` | the threads that share a rank's large computations |

mod control;
mod engine;
pub mod ep;
mod launch;
mod memory;
pub mod model;
mod rank;
mod serve;
mod threads;
mod unit;

pub use control::{RendezvousError, Secret, SecretError, TransportChoice};
pub use engine::{EngineLimits, KvBudget};
pub use ep::{ExpertLayout, ForcedRate, NodeLayout, UnknownName, WireType};
pub use launch::{LaunchError, RankDeath, Ranks};
#[cfg(feature = "gpu")]
pub use rank::GpuProvider;
pub use rank::{Announce, CpuError, CpuList, DeviceChoice, WorkerConfig, WorkerError, WorkerEvent, gpu_kernels, run};
pub use unit::Shutdown;
