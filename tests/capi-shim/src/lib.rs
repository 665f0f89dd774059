//! `libsemmoe_kernels_capi_shim.so`: the C interface of `semmoe-kernels-capi`, whose CUDA calls run the CUDA sources on
//! the CPU, through `semmoe-kernels-shim`. For tests: a program that loads it sees `semmoe_has_cuda() == 1`, and device
//! pointers are pointers of this process.
//!
//! Ranks are threads of one process. A collective runs once all ranks of its group have launched it, and every call
//! returns when its kernels have finished, as with blocking launches on a GPU. A freed rank is missing from then on:
//! the other ranks' kernels wait for it until their timeout. Time is the shim's: a microsecond is a round without
//! progress, so no test depends on a clock. The next call returns a kernel's report, as on a GPU.

mod group;

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use capi;
use capi::plug::{Launcher, Opened, RankFacts};
use semmoe_kernels_cuda::{Buffer, GpuError, Launch};

use group::Launches;

/// Blocks per rank: more than one, but few, because each CUDA thread is a fiber.
const BLOCKS: u32 = 2;

/// Loading the library installs the shim.
#[used]
// SAFETY: a function without arguments, called once while the library is loaded; it only sets a `OnceLock`.
#[unsafe(link_section = ".init_array")]
static INSTALL: extern "C" fn() = install_at_load;

extern "C" fn install_at_load() {
    install();
}

/// Sends CUDA calls to the shim, unless another backend was installed before.
pub fn install() {
    capi::plug::install(open);
}

fn open(facts: &RankFacts) -> Result<Opened, GpuError> {
    group::shim()?;
    let word = Box::new(AtomicU64::new(0));
    let report = Buffer { address: word.as_ptr().addr() as u64, bytes: 8 };
    let rank = Rank { rank: facts.rank, group: group::join(facts)?, word };
    Ok(Opened { launcher: Box::new(rank), report, blocks: BLOCKS })
}

/// One rank's stream and report word.
struct Rank {
    rank: usize,
    group: Arc<Launches>,
    /// Boxed, because the kernels hold its address.
    word: Box<AtomicU64>,
}

impl Launcher for Rank {
    fn launch(&mut self, launches: &[Launch], _: *mut c_void) -> Result<(), GpuError> {
        // A sort is local to its rank, so no other thread has to call it.
        match launches.iter().all(|launch| launch.kernel().starts_with("semmoe_argsort")) {
            true => Ok(group::run(&[launches.to_vec()], 1)?),
            false => Ok(self.group.arrive(self.rank, launches.to_vec())?),
        }
    }

    fn report(&self) -> u64 {
        self.word.load(Ordering::Relaxed)
    }

    /// Selects the scalar path, which accesses the parts instead of a multicast address.
    fn has_multicast(&self) -> bool {
        true
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        self.group.leave(self.rank);
    }
}
