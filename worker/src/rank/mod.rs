//! The life of one rank's process, from its arguments to its exit.
//!
//! | module | what |
//! |---|---|
//! | `config` | a rank's configuration, and the events that it announces |
//! | `cpus` | the CPUs that computing threads are pinned to |
//! | `device` | the compute device, including a GPU shared by the ranks of a process |
//! | `error` | reasons why a rank ended, and the exit codes |
//! | `prepare` | all checks that can fail before anything is bound or loaded |
//! | `targets` | the checks of attention groups and of the layouts that the unit can switch to |
//! | `start` | transport, model and engine once the unit has formed |
//! | `front` | rank 0: rendezvous, HTTP, and shutdown of the whole unit |
//! | `follower` | all other ranks |
//! | `several` | several ranks of one process, on one GPU |
//! | `stop` | signals and standard input |

mod config;
mod cpus;
mod device;
mod error;
mod follower;
mod front;
#[cfg(feature = "gpu")]
mod gpu;
mod prepare;
mod several;
mod start;
mod stop;
mod targets;

pub use config::{Announce, WorkerConfig, WorkerEvent};
pub use cpus::{CpuError, CpuList};
pub use device::{DeviceChoice, gpu_kernels};
pub use error::WorkerError;
#[cfg(feature = "gpu")]
pub use gpu::GpuProvider;

use crate::control::RendezvousError;

/// Runs one rank, or all ranks of one GPU, until it is asked to stop or the unit fails. Blocks the caller and uses its
/// own runtime.
///
/// After another rank was lost, rank 0 keeps returning the cause until it exits ([`WorkerConfig::exit_after_loss`]).
///
/// # Errors
/// One sentence that describes invalid or inconsistent arguments, files or peers, before anything is served, or that
/// names the rank that was lost.
pub fn run(config: WorkerConfig) -> Result<(), WorkerError> {
    config.check()?;
    #[cfg(feature = "gpu")]
    let config = gpu::with_gpu(config)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(if config.rank == 0 { 2 } else { 1 })
        .enable_all()
        .build()
        .map_err(WorkerError::Runtime)?;
    stop::watch(&config, &runtime);
    let (here, handle) = (config.device.ranks_here(), runtime.handle());
    let outcome = match config.rank {
        _ if here > 1 => several::run(&config, here, handle),
        0 => front::run(config, handle),
        _ => follower::run(config, handle),
    };
    runtime.shutdown_background();
    match outcome {
        // A requested stop during startup is a success.
        Err(WorkerError::Rendezvous(RendezvousError::Stopped)) => Ok(()),
        outcome => outcome,
    }
}
