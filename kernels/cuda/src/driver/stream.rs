//! The stream of a GPU as [`Runner`].

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::CUstream;

use super::memory::HostWords;
use super::{Device, DeviceError, memory};
use crate::launch::{Grid, Launch};
use crate::runner::Runner;
use crate::team::Buffer;

/// A stream, and the word that the rank's kernels report to.
pub struct DeviceStream {
    device: Arc<Device>,
    stream: CUstream,
    word: HostWords,
    blocks: u32,
}

// SAFETY: stream and word may be used by any thread that binds the GPU, as every method does.
unsafe impl Send for DeviceStream {}

impl DeviceStream {
    /// Of a GPU, with as many blocks for each collective as all other ranks have.
    ///
    /// # Errors
    /// A driver that refuses.
    ///
    /// # Safety
    /// `stream` is one of the GPU as long as the value is there.
    pub unsafe fn new(device: Arc<Device>, stream: *mut c_void, blocks: u32) -> Result<Self, DeviceError> {
        device.bind()?;
        Ok(Self { word: HostWords::new(1)?, device, stream: stream.cast(), blocks })
    }

    /// The word, for the rank's team.
    pub fn word(&self) -> Buffer {
        self.word.buffers()[0]
    }

    fn bound(&self, call: impl FnOnce() -> Result<(), DeviceError>) -> Result<(), String> {
        self.device.bind().and_then(|()| call()).map_err(|error| error.to_string())
    }
}

impl Runner for DeviceStream {
    unsafe fn launch(&self, launch: &Launch) -> Result<(), String> {
        // SAFETY: the caller's promise.
        self.bound(|| unsafe { self.device.launch(launch, self.stream) })
    }

    /// From pageable memory, which the driver has copied when it returns.
    unsafe fn write(&self, bytes: &[u8], to: Buffer) -> Result<(), String> {
        // SAFETY: the caller's promise.
        self.bound(|| unsafe { Ok(result::memcpy_htod_async(to.address, bytes, self.stream)?) })
    }

    unsafe fn copy(&self, from: Buffer, to: Buffer) -> Result<(), String> {
        // SAFETY: the caller's promise.
        self.bound(|| unsafe { memory::copy(from, to, to.bytes as usize, self.stream) })
    }

    fn grid(&self) -> Grid {
        Grid::of_blocks(self.blocks)
    }

    fn report(&self) -> u64 {
        self.word.read(0)
    }
}
