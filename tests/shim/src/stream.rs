//! The stream of a rank whose GPU is the shim.

use std::sync::{Arc, Mutex, PoisonError};

use semmoe_kernels_cuda::{Accelerator, Buffer, GpuError, Grid, Launch, Runner};

use crate::build::Shim;
use crate::group::Group;
use crate::memory::HostBuffer;
use crate::run::{Mutant, Step, StreamEnd};

/// Size of a GPU's memory, unless [`ShimStream::limited`] sets another.
const MEMORY_BYTES: u64 = 64 << 30;

/// One rank's stream over the shim: its work is done when a call returns. Device memory is host memory, and the stream
/// owns its rank's buffers.
pub struct ShimStream {
    shim: &'static Shim,
    rank: usize,
    /// The ranks whose kernels run together; `None` if kernels are local to their rank.
    group: Option<Arc<Group<Launch>>>,
    report: Arc<HostBuffer>,
    memory: Mutex<Memory>,
}

struct Memory {
    free: u64,
    kept: Vec<Arc<HostBuffer>>,
}

impl ShimStream {
    /// A stream for `rank`, whose kernels report to the eight bytes of `report`.
    pub fn new(shim: &'static Shim, rank: usize, group: Option<Arc<Group<Launch>>>, report: Arc<HostBuffer>) -> Self {
        let memory = Mutex::new(Memory { free: MEMORY_BYTES, kept: Vec::new() });
        Self { shim, rank, group, report, memory }
    }

    /// Ranks whose kernels run together on the shim.
    pub fn group(shim: &'static Shim, ranks: usize) -> Arc<Group<Launch>> {
        let run = |launches: Vec<Option<Launch>>, seed| run(shim, &launches, seed).map(drop);
        Arc::new(Group::new(ranks, run))
    }

    /// Limits the GPU's free memory.
    #[must_use]
    pub fn limited(self, bytes: u64) -> Self {
        self.memory().free = bytes;
        self
    }

    /// Keeps memory of the rank's calls alive as long as the stream.
    pub fn keep(&self, memory: impl IntoIterator<Item = Arc<HostBuffer>>) {
        self.memory().kept.extend(memory);
    }

    fn memory(&self) -> std::sync::MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn run(shim: &Shim, launches: &[Option<Launch>], seed: u64) -> Result<Vec<StreamEnd>, String> {
    let streams: Vec<Vec<Step<'_>>> = launches.iter().map(|launch| launch.iter().map(Step::Launch).collect()).collect();
    // SAFETY: all ranks are inside their calls, or gone; streams keep the ranks' memory.
    unsafe { shim.run(&streams, seed, Mutant::None) }.map_err(|error| error.to_string())
}

impl Runner for ShimStream {
    unsafe fn launch(&self, launch: &Launch) -> Result<(), GpuError> {
        match &self.group {
            Some(group) if launch.is_collective() => Ok(group.arrive(self.rank, *launch)?),
            _ => Ok(run(self.shim, &[Some(*launch)], 1).map(drop)?),
        }
    }

    unsafe fn write(&self, bytes: &[u8], to: Buffer) -> Result<(), GpuError> {
        // SAFETY: the caller's promise; device memory is the host's.
        unsafe { std::ptr::copy(bytes.as_ptr(), to.address as *mut u8, bytes.len()) };
        Ok(())
    }

    unsafe fn copy(&self, from: Buffer, to: Buffer) -> Result<(), GpuError> {
        // SAFETY: as above.
        unsafe { std::ptr::copy(from.address as *const u8, to.address as *mut u8, to.bytes as usize) };
        Ok(())
    }

    fn grid(&self) -> Grid {
        Grid { blocks: 2, threads: 32 }
    }

    fn report(&self) -> u64 {
        // SAFETY: eight bytes, aligned to 16, that this stream keeps.
        unsafe { (self.report.buffer().address as *const u64).read_volatile() }
    }
}

impl Accelerator for ShimStream {
    /// Poisoned, so that reads of uninitialised memory show. Refused once ranks have synchronised: a GPU would first
    /// wait for all of its kernels, one of which may wait for this rank.
    fn allocate(&self, bytes: u64) -> Result<Buffer, GpuError> {
        if self.group.as_ref().is_some_and(|group| group.ranks() > 1 && group.has_synchronised()) {
            let error =
                format!("{bytes} bytes were allocated after the first collective, which would wait for all kernels");
            return Err(error.into());
        }
        let mut memory = self.memory();
        let free = memory.free;
        memory.free = free.checked_sub(bytes).ok_or_else(|| format!("{bytes} bytes do not fit the free {free}"))?;
        let allocated = Arc::new(HostBuffer::poisoned(bytes as usize));
        memory.kept.push(Arc::clone(&allocated));
        Ok(allocated.buffer())
    }

    unsafe fn read(&self, from: Buffer, to: &mut [u8]) -> Result<(), GpuError> {
        if self.report() != 0 {
            return Err("a kernel stopped".into());
        }
        // SAFETY: the caller's promise; device memory is the host's.
        unsafe { std::ptr::copy(from.address as *const u8, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    fn free_bytes(&self) -> Result<u64, GpuError> {
        Ok(self.memory().free)
    }

    fn export(&self, _: Buffer) -> Result<Vec<u8>, GpuError> {
        Err("this memory belongs to one process".into())
    }

    fn import(&self, _: &[u8], _: u64) -> Result<Buffer, GpuError> {
        Err("this stream maps no memory of other processes".into())
    }
}

impl Drop for ShimStream {
    fn drop(&mut self) {
        self.group.iter().for_each(|group| group.leave(self.rank));
    }
}
