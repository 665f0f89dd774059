//! Where the launches of calls for CUDA go: to a GPU, or to what another crate installed.

use std::sync::OnceLock;
use std::time::Duration;

use crate::abi::InitArgs;
use crate::backend::{Backend, Facts};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::cuda::Cuda;
pub use crate::cuda::{Launcher, Opened};
use crate::failure::{Code, Failure};

/// The rank, as an [`Opener`] gets it.
#[derive(Clone, Copy, Debug)]
pub struct RankFacts {
    /// Its number.
    pub rank: usize,
    /// P
    pub world: usize,
    /// Rank 0's signals: the same for all ranks of a group, and for no other group at the time.
    pub group: usize,
    /// The most that a call waits for a peer.
    pub timeout: Duration,
}

/// Makes a rank's launcher, at `semmoe_init`.
pub type Opener = fn(&RankFacts) -> Result<Opened, String>;

static OPENER: OnceLock<Opener> = OnceLock::new();

/// From now on all calls for CUDA go to what `opener` makes; false if something was installed before.
pub fn install(opener: Opener) -> bool {
    OPENER.set(opener).is_ok()
}

/// Whether calls for CUDA can be made here.
pub(crate) fn available() -> bool {
    #[cfg(feature = "cuda")]
    let gpu = semmoe_kernels_cuda::driver::available();
    #[cfg(not(feature = "cuda"))]
    let gpu = false;
    OPENER.get().is_some() || gpu
}

/// Whether something can run launches.
pub(crate) fn built() -> Result<(), Failure> {
    if OPENER.get().is_some() {
        return Ok(());
    }
    #[cfg(feature = "cuda")]
    return cuda::built();
    #[cfg(not(feature = "cuda"))]
    Err(crate::backend::not_built())
}

/// Opens what was installed, else the GPU.
///
/// # Safety
/// Buffers and signals are what the header asks for.
pub(crate) unsafe fn open(args: &InitArgs, facts: &Facts) -> Result<Box<dyn Backend>, Failure> {
    let Some(opener) = OPENER.get() else {
        #[cfg(feature = "cuda")]
        // SAFETY: the caller's promise.
        return unsafe { cuda::open(args, facts) };
        #[cfg(not(feature = "cuda"))]
        return Err(crate::backend::not_built());
    };
    // SAFETY: the array has `world` elements, at least one.
    let group = unsafe { *args.signals }.addr();
    let reported = RankFacts { rank: facts.rank, world: facts.world, group, timeout: facts.timeout };
    let opened = opener(&reported).map_err(|sentence| Failure::new(Code::Device, sentence))?;
    // SAFETY: the caller's promise.
    Ok(Box::new(unsafe { Cuda::new(args, facts, opened) }?))
}
