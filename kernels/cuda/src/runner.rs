//! Runs work on a GPU in stream order.

use std::sync::Arc;

use crate::error::GpuError;
use crate::launch::{Grid, Launch};
use crate::team::Buffer;

/// One stream of this rank's GPU. Errors come from the driver; no call waits for the GPU.
pub trait Runner: Send {
    /// Launches a kernel.
    ///
    /// # Errors
    /// The driver's message.
    ///
    /// # Safety
    /// All memory that the launch uses must be on this GPU and stay valid until the launch has completed on the stream.
    unsafe fn launch(&self, launch: &Launch) -> Result<(), GpuError>;

    /// Copies bytes from the host; they may change as soon as this returns.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Safety
    /// `to` must be memory of this GPU, with room for all bytes, until the stream has passed the copy.
    unsafe fn write(&self, bytes: &[u8], to: Buffer) -> Result<(), GpuError>;

    /// Copies as many bytes as `to` has.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Safety
    /// Both must be memory of this GPU, of that size, until the stream has passed the copy.
    unsafe fn copy(&self, from: Buffer, to: Buffer) -> Result<(), GpuError>;

    /// Returns the blocks and threads per rank in a collective, equal on all ranks. The fused norm uses as many threads
    /// in blocks of its own size.
    fn grid(&self) -> Grid;

    /// Returns the current value of the word to which kernels report.
    fn report(&self) -> u64;
}

/// One rank's GPU, as used by a compute backend.
pub trait Accelerator: Runner {
    /// Allocates memory, which the accelerator owns and frees on drop. Its contents are undefined.
    ///
    /// # Errors
    /// The driver's message if the GPU has too little free memory.
    fn allocate(&self, bytes: u64) -> Result<Buffer, GpuError>;

    /// Launches kernels in this order.
    ///
    /// # Errors
    /// The driver's message.
    ///
    /// # Safety
    /// The contract of [`Runner::launch`] must hold for each launch.
    unsafe fn launch_all(&self, launches: &[Launch]) -> Result<(), GpuError> {
        // SAFETY: upheld by the caller.
        launches.iter().try_for_each(|launch| unsafe { self.launch(launch) })
    }

    /// Copies `to.len()` bytes to the host once the stream has passed all earlier work, and waits until they have
    /// arrived.
    ///
    /// # Errors
    /// The driver's message, or the report of a kernel that stopped.
    ///
    /// # Safety
    /// `from` must be memory of this GPU, of that size.
    unsafe fn read(&self, from: Buffer, to: &mut [u8]) -> Result<(), GpuError>;

    /// Returns the number of bytes that [`allocate`](Self::allocate) can still provide.
    ///
    /// # Errors
    /// The driver's message.
    fn free_bytes(&self) -> Result<u64, GpuError>;

    /// Returns a handle with which another process on this host can [`import`](Self::import) an allocation, as long as
    /// the allocation exists.
    ///
    /// # Errors
    /// The driver's message.
    fn export(&self, memory: Buffer) -> Result<Vec<u8>, GpuError>;

    /// Maps `bytes` bytes that another process exported. They stay mapped until the accelerator is dropped.
    ///
    /// # Errors
    /// If the handle is invalid; otherwise the driver's message, for example if this GPU cannot access the other one.
    fn import(&self, handle: &[u8], bytes: u64) -> Result<Buffer, GpuError>;
}

/// A stream that a rank's collectives share with its compute backend.
impl<R: Runner + ?Sized + Sync> Runner for Arc<R> {
    unsafe fn launch(&self, launch: &Launch) -> Result<(), GpuError> {
        // SAFETY: upheld by the caller.
        unsafe { (**self).launch(launch) }
    }

    unsafe fn write(&self, bytes: &[u8], to: Buffer) -> Result<(), GpuError> {
        // SAFETY: upheld by the caller.
        unsafe { (**self).write(bytes, to) }
    }

    unsafe fn copy(&self, from: Buffer, to: Buffer) -> Result<(), GpuError> {
        // SAFETY: upheld by the caller.
        unsafe { (**self).copy(from, to) }
    }

    fn grid(&self) -> Grid {
        (**self).grid()
    }

    fn report(&self) -> u64 {
        (**self).report()
    }
}
