//! Runs work on a GPU, in the order of one stream.

use crate::launch::{Grid, Launch};
use crate::team::Buffer;

/// One stream of this rank's GPU. Errors are the driver's own words; nothing waits for the GPU.
pub trait Runner: Send {
    /// Launches a kernel.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// The memory of the launch is this GPU's until the stream has passed it.
    unsafe fn launch(&self, launch: &Launch) -> Result<(), String>;

    /// Copies from the host, whose bytes may change as soon as this returns.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// `to` is memory of this GPU, with room for all bytes, until the stream has passed the copy.
    unsafe fn write(&self, bytes: &[u8], to: Buffer) -> Result<(), String>;

    /// Copies as many bytes as `to` has.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// Both are memory of this GPU, of that size, until the stream has passed the copy.
    unsafe fn copy(&self, from: Buffer, to: Buffer) -> Result<(), String>;

    /// Of each rank in a collective, with as many blocks on all ranks; the fused norm takes as many threads in blocks
    /// of its own size.
    fn grid(&self) -> Grid;

    /// The word that kernels report to, as it is now.
    fn report(&self) -> u64;
}
