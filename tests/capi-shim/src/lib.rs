//! `libsemmoe_kernels_capi_shim.so`: the C interface of `semmoe-kernels-capi`, whose calls for CUDA run the CUDA
//! sources on the CPU, through `semmoe-kernels-shim`. For tests: a program that loads it sees `semmoe_has_cuda() == 1`,
//! and device pointers are pointers of this process.
//!
//! Ranks are threads of one process. A collective runs when all ranks of its group have launched it, and every call
//! returns when its kernels have ended, as on a GPU with blocking launches. A rank that was freed is missing from then
//! on: the kernels of the others wait for it, and stop at their time-out. Time is the shim's: a microsecond is a round
//! in which nothing moves, so that no test waits for a clock. What a kernel reports is returned by the next call, as on
//! a GPU.

mod group;

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use capi;
use capi::plug::{Launcher, Opened, RankFacts};
use semmoe_kernels_cuda::{Buffer, Launch};

use group::Launches;

/// Blocks of each rank: more than one, and few, as each CUDA thread is a fiber.
const BLOCKS: u32 = 2;

/// Loading the library is enough.
#[used]
// SAFETY: a function without arguments, called once while the library is loaded; it only sets a `OnceLock`.
#[unsafe(link_section = ".init_array")]
static INSTALL: extern "C" fn() = install_at_load;

extern "C" fn install_at_load() {
    install();
}

/// Sends calls for CUDA to the shim, if nothing else was installed before.
pub fn install() {
    capi::plug::install(open);
}

fn open(facts: &RankFacts) -> Result<Opened, String> {
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
    /// In a place of its own, which the kernels know.
    word: Box<AtomicU64>,
}

impl Launcher for Rank {
    fn launch(&mut self, launches: &[Launch], _: *mut c_void) -> Result<(), String> {
        // A sort is one rank's own affair: no other thread may call it.
        match launches.iter().all(|launch| launch.kernel().starts_with("semmoe_argsort")) {
            true => group::run(&[launches.to_vec()], 1),
            false => self.group.meet(self.rank, launches.to_vec()),
        }
    }

    fn report(&self) -> u64 {
        self.word.load(Ordering::Relaxed)
    }

    /// Their scalar path, which goes to the parts instead of an address.
    fn has_multicast(&self) -> bool {
        true
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        self.group.leave(self.rank);
    }
}
