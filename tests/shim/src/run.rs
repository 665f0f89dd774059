//! Streams of steps, one per rank.

use std::ffi::{CStr, CString, c_char, c_void};

use semmoe_kernels_cuda::{Buffer, Launch};

use crate::build::Shim;
use crate::error::ShimError;

/// A kernel with one piece of its synchronisation omitted or weakened; tests must notice each. The numbers match
/// `shim.h`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Mutant {
    /// Unchanged kernels.
    None = 0,
    /// Does not wait until all ranks have begun.
    NoEntryWait = 1,
    /// Only the waiting threads wait, not their block.
    NoEntryBarrier = 2,
    /// Does not wait until all ranks have ended.
    NoExitWait = 3,
    /// Signals the end while other threads of the block are still working.
    NoExitBarrier = 4,
    /// Accepts the previous call's signals.
    PreviousEpoch = 5,
    /// Entry and exit share a word.
    OneWord = 6,
    /// Signals the end without releasing its writes.
    RelaxedExit = 7,
    /// Scans the counts before all warps have counted.
    NoSortBarrier = 8,
}

/// One step of a stream.
#[derive(Clone, Copy, Debug)]
pub enum Step<'a> {
    /// Copies `from` to `to`.
    Copy {
        /// Source.
        from: Buffer,
        /// Destination; determines the size.
        to: Buffer,
    },
    /// Sets every byte of `to` to `byte`.
    Fill {
        /// Destination.
        to: Buffer,
        /// The byte.
        byte: u8,
    },
    /// A kernel.
    Launch(&'a Launch),
    /// Continues only after all other ranks have been stuck or done for `ticks` rounds.
    Hold {
        /// Rounds.
        ticks: u64,
    },
}

/// How a stream ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamEnd {
    /// All steps completed.
    Done,
    /// A kernel stopped itself; later steps did not run.
    Trapped,
}

#[derive(Default)]
#[repr(C)]
struct RawStep {
    kind: u32,
    grid_x: u32,
    grid_y: u32,
    threads: u32,
    kernel: *const c_char,
    params: *const c_void,
    params_bytes: u64,
    to: u64,
    from: u64,
    length: u64,
    byte: u32,
    together: u32,
}

#[repr(C)]
pub(crate) struct RawStream {
    steps: *const RawStep,
    count: u64,
    trapped: u32,
    padding: u32,
}

pub(crate) type RunFn = unsafe extern "C" fn(*mut RawStream, u64, u64, u32, *mut c_char, u64) -> i32;

/// The scheduler's state is global: one run at a time per process.
static ONE_RUN: std::sync::Mutex<()> = std::sync::Mutex::new(());

thread_local! {
    /// Bytes loaded and stored by this thread's last run.
    static MOVED: std::cell::Cell<(u64, u64)> = const { std::cell::Cell::new((0, 0)) };
}

impl Shim {
    /// Runs the streams together until each is done or trapped; returns how each ended.
    ///
    /// # Errors
    /// A barrier that can never complete, a misaligned access, a launch that the kernel does not support.
    ///
    /// # Safety
    /// The memory in steps and launches is valid for the run and not borrowed; signals are zeroed or from earlier runs.
    pub unsafe fn run(
        &self,
        streams: &[Vec<Step<'_>>],
        seed: u64,
        mutant: Mutant,
    ) -> Result<Vec<StreamEnd>, ShimError> {
        let names: Vec<Vec<CString>> = streams.iter().map(|steps| steps.iter().map(kernel_name).collect()).collect();
        let steps: Vec<Vec<RawStep>> = streams
            .iter()
            .zip(&names)
            .map(|(steps, names)| steps.iter().zip(names).map(|(step, name)| raw(step, name)).collect())
            .collect();
        let mut raw: Vec<RawStream> = steps
            .iter()
            .map(|steps| RawStream { steps: steps.as_ptr(), count: steps.len() as u64, trapped: 0, padding: 0 })
            .collect();
        let mut message = [0u8; 512];
        let _one = ONE_RUN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // SAFETY: the arrays outlive the call and have the given lengths; the caller guarantees the steps' memory.
        let status = unsafe {
            (self.run)(
                raw.as_mut_ptr(),
                raw.len() as u64,
                seed,
                mutant as u32,
                message.as_mut_ptr().cast(),
                message.len() as u64,
            )
        };
        let (mut loaded, mut stored) = (0, 0);
        // SAFETY: both numbers outlive the call, and no other run is under way.
        unsafe { (self.moved)(&raw mut loaded, &raw mut stored) };
        MOVED.set((loaded, stored));
        if status != 0 {
            let sentence = CStr::from_bytes_until_nul(&message).map(CStr::to_string_lossy).unwrap_or_default();
            return Err(ShimError::Run(sentence.into_owned()));
        }
        Ok(raw.iter().map(|s| if s.trapped == 0 { StreamEnd::Done } else { StreamEnd::Trapped }).collect())
    }

    /// Allows for ranks of other processes in later runs: time is the clock's, and runs with equal seeds are no longer
    /// identical.
    pub fn beside_others(&self) {
        let _one = ONE_RUN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // SAFETY: no run is under way.
        unsafe { (self.beside_others)(1) };
    }

    /// Omits one `__syncthreads()` or `__syncwarp(..)` of the sources from later runs, by file and line.
    pub fn leave_out(&self, file: &'static CStr, line: u32) {
        let _one = ONE_RUN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // SAFETY: no run is under way, and the name stays.
        unsafe { (self.leave_out)(file.as_ptr(), line) };
    }

    /// Bytes that the 16-byte loads and stores of this thread's last run moved.
    pub fn moved(&self) -> (u64, u64) {
        MOVED.get()
    }
}

fn kernel_name(step: &Step<'_>) -> CString {
    match step {
        Step::Launch(launch) => CString::new(launch.kernel()).unwrap_or_default(),
        _ => CString::default(),
    }
}

fn raw(step: &Step<'_>, name: &CStr) -> RawStep {
    let mut raw = RawStep { kernel: name.as_ptr(), ..RawStep::default() };
    match *step {
        Step::Copy { from, to } => {
            (raw.to, raw.from, raw.length) = (to.address, from.address, to.bytes.min(from.bytes));
        }
        Step::Fill { to, byte } => {
            (raw.kind, raw.to, raw.length, raw.byte) = (1, to.address, to.bytes, u32::from(byte))
        }
        Step::Launch(launch) => {
            (raw.grid_x, raw.grid_y, raw.threads) = launch.shape();
            let params = launch.params();
            raw.together = u32::from(launch.is_collective());
            (raw.kind, raw.params, raw.params_bytes) = (2, params.as_ptr().cast(), params.len() as u64);
        }
        Step::Hold { ticks } => (raw.kind, raw.length) = (3, ticks),
    }
    raw
}
