//! Routes the launches of CUDA calls to a GPU, or to a launcher installed by another crate.

use std::sync::OnceLock;
use std::time::Duration;

use semmoe_kernels_cuda::GpuError;

use crate::abi::InitArgs;
use crate::backend::{Backend, Facts};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::cuda::Cuda;
pub use crate::cuda::{Launcher, Opened};
use crate::failure::{Code, Failure};

/// Facts about a rank, passed to an [`Opener`].
#[derive(Clone, Copy, Debug)]
pub struct RankFacts {
    /// The rank's number.
    pub rank: usize,
    /// P
    pub world: usize,
    /// Address of rank 0's signals: equal for all ranks of a group, and unique among the groups that exist at the time.
    pub group: usize,
    /// Maximum time for which a call waits for a peer.
    pub timeout: Duration,
}

/// Creates a rank's launcher; called by `semmoe_init`.
pub type Opener = fn(&RankFacts) -> Result<Opened, GpuError>;

static OPENER: OnceLock<Opener> = OnceLock::new();

/// Routes all further CUDA calls to launchers from `opener`; returns false if an opener was installed before.
pub fn install(opener: Opener) -> bool {
    OPENER.set(opener).is_ok()
}

/// Whether CUDA calls are possible on this machine.
pub(crate) fn available() -> bool {
    #[cfg(feature = "cuda")]
    let gpu = semmoe_kernels_cuda::driver::available();
    #[cfg(not(feature = "cuda"))]
    let gpu = false;
    OPENER.get().is_some() || gpu
}

/// Whether launches can be executed.
pub(crate) fn built() -> Result<(), Failure> {
    if OPENER.get().is_some() {
        return Ok(());
    }
    #[cfg(feature = "cuda")]
    return cuda::built();
    #[cfg(not(feature = "cuda"))]
    Err(crate::backend::not_built())
}

/// Opens the installed launcher, or the GPU if there is none.
///
/// # Safety
/// Buffers and signals must meet the header's requirements.
pub(crate) unsafe fn open(args: &InitArgs, facts: &Facts) -> Result<Box<dyn Backend>, Failure> {
    let Some(opener) = OPENER.get() else {
        #[cfg(feature = "cuda")]
        // SAFETY: upheld by the caller.
        return unsafe { cuda::open(args, facts) };
        #[cfg(not(feature = "cuda"))]
        return Err(crate::backend::not_built());
    };
    // SAFETY: the array has `world` elements, at least one.
    let group = unsafe { *args.signals }.addr();
    let reported = RankFacts { rank: facts.rank, world: facts.world, group, timeout: facts.timeout };
    let opened = opener(&reported).map_err(|error| Failure::new(Code::Device, error.to_string()))?;
    // SAFETY: upheld by the caller.
    Ok(Box::new(unsafe { Cuda::new(args, facts, opened) }?))
}
