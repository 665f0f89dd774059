//! Runs work on a GPU, in the order of one stream.

use std::sync::Arc;

use crate::error::GpuError;
use crate::launch::{Grid, Launch};
use crate::team::Buffer;

/// One stream of this rank's GPU. Errors are the driver's; no call waits for the GPU.
pub trait Runner: Send {
    /// Launches a kernel.
    ///
    /// # Errors
    /// The driver's message.
    ///
    /// # Safety
    /// The memory of the launch belongs to this GPU until the stream has passed it.
    unsafe fn launch(&self, launch: &Launch) -> Result<(), GpuError>;

    /// Copies from the host, whose bytes may change as soon as this returns.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Safety
    /// `to` is memory of this GPU, with room for all bytes, until the stream has passed the copy.
    unsafe fn write(&self, bytes: &[u8], to: Buffer) -> Result<(), GpuError>;

    /// Copies as many bytes as `to` has.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Safety
    /// Both are memory of this GPU, of that size, until the stream has passed the copy.
    unsafe fn copy(&self, from: Buffer, to: Buffer) -> Result<(), GpuError>;

    /// Blocks and threads of each rank in a collective, equal on all ranks; the fused norm uses as many threads in
    /// blocks of its own size.
    fn grid(&self) -> Grid;

    /// The current value of the word that kernels report to.
    fn report(&self) -> u64;
}

/// One rank's GPU, as a compute backend uses it.
pub trait Accelerator: Runner {
    /// Memory owned by the accelerator, which frees it on drop. Its content is undefined.
    ///
    /// # Errors
    /// The driver's message if the GPU has too little free memory.
    fn allocate(&self, bytes: u64) -> Result<Buffer, GpuError>;

    /// Launches kernels, in this order.
    ///
    /// # Errors
    /// The driver's message.
    ///
    /// # Safety
    /// [`Runner::launch`]'s contract holds for each.
    unsafe fn launch_all(&self, launches: &[Launch]) -> Result<(), GpuError> {
        // SAFETY: the caller guarantees it.
        launches.iter().try_for_each(|launch| unsafe { self.launch(launch) })
    }

    /// Copies `to.len()` bytes to the host once the stream has passed all earlier work, and waits for them.
    ///
    /// # Errors
    /// The driver's message, or the report of a kernel that stopped.
    ///
    /// # Safety
    /// `from` is memory of this GPU, of that size.
    unsafe fn read(&self, from: Buffer, to: &mut [u8]) -> Result<(), GpuError>;

    /// Bytes that [`allocate`](Self::allocate) can still provide.
    ///
    /// # Errors
    /// The driver's message.
    fn free_bytes(&self) -> Result<u64, GpuError>;
}

/// A stream that a rank's collectives share with its compute backend.
impl<R: Runner + ?Sized + Sync> Runner for Arc<R> {
    unsafe fn launch(&self, launch: &Launch) -> Result<(), GpuError> {
        // SAFETY: the caller guarantees it.
        unsafe { (**self).launch(launch) }
    }

    unsafe fn write(&self, bytes: &[u8], to: Buffer) -> Result<(), GpuError> {
        // SAFETY: the caller guarantees it.
        unsafe { (**self).write(bytes, to) }
    }

    unsafe fn copy(&self, from: Buffer, to: Buffer) -> Result<(), GpuError> {
        // SAFETY: the caller guarantees it.
        unsafe { (**self).copy(from, to) }
    }

    fn grid(&self) -> Grid {
        (**self).grid()
    }

    fn report(&self) -> u64 {
        (**self).report()
    }
}
