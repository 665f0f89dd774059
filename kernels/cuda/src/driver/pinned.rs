//! Pinned host memory for asynchronous copies to and from a GPU: a rank's copies do not wait for its kernels.

use std::ffi::c_void;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUstream};

use super::DeviceError;

/// A pinned allocation.
pub(super) struct Pinned {
    start: *mut u8,
    bytes: usize,
}

impl Pinned {
    /// Allocates pinned memory for the bound GPU.
    pub(super) fn new(bytes: usize) -> Result<Self, DeviceError> {
        // SAFETY: freed in `drop`.
        let start = unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE)? };
        Ok(Self { start: start.cast(), bytes })
    }

    fn part(&mut self, from: usize, bytes: usize) -> &mut [u8] {
        assert!(from + bytes <= self.bytes, "{bytes} bytes at offset {from} exceed {}", self.bytes);
        // SAFETY: the range is within the allocation, which `self` borrows. Nothing reads bytes that no copy has
        // written.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(from), bytes) }
    }

    /// Returns the first bytes.
    pub(super) fn first(&mut self, bytes: usize) -> &mut [u8] {
        self.part(0, bytes)
    }

    /// Number of bytes.
    pub(super) fn len(&self) -> usize {
        self.bytes
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, freed once; after a trap the driver may refuse.
        let _ = unsafe { result::free_host(self.start.cast::<c_void>()) };
    }
}

/// Stages copies to a GPU, using two halves alternately. A half is reused once the stream has passed all copies from
/// it, so that a call waits only if half a ring of copies is still pending in the stream.
pub(super) struct Ring {
    memory: Pinned,
    /// For each half, an event that completes with its last copy.
    passed: [Passed; 2],
    half: usize,
    used: usize,
}

/// Alignment of each copy's start, because whole words are copied faster.
const COPY_ALIGNMENT: usize = 64;

impl Ring {
    pub(super) fn new(bytes: usize) -> Result<Self, DeviceError> {
        let memory = Pinned::new(bytes)?;
        Ok(Self { memory, passed: [Passed::new()?, Passed::new()?], half: 0, used: 0 })
    }

    /// Copies `bytes` to an address of the bound GPU. The bytes may change after this returns.
    ///
    /// # Safety
    /// There must be room at the address until `stream` has passed the copy. All calls must use one stream of this GPU.
    pub(super) unsafe fn copy(&mut self, bytes: &[u8], to: u64, stream: CUstream) -> Result<(), DeviceError> {
        let half_bytes = self.memory.len() / 2;
        let mut done = 0;
        while done < bytes.len() {
            if self.used == half_bytes {
                self.turn(stream)?;
            }
            let count = (bytes.len() - done).min(half_bytes - self.used);
            let part = self.memory.part(self.half * half_bytes + self.used, count);
            part.copy_from_slice(&bytes[done..done + count]);
            // SAFETY: the part is not overwritten before the stream has passed the copy; the caller guarantees the
            // rest.
            unsafe { result::memcpy_htod_async(to + done as u64, part, stream)? };
            self.used = (self.used + count).next_multiple_of(COPY_ALIGNMENT).min(half_bytes);
            done += count;
        }
        Ok(())
    }

    /// Switches to the other half.
    fn turn(&mut self, stream: CUstream) -> Result<(), DeviceError> {
        self.passed[self.half].mark(stream)?;
        self.half = 1 - self.half;
        self.used = 0;
        self.passed[self.half].wait()
    }
}

/// A point in a stream that can be marked repeatedly.
struct Passed(CUevent);

impl Passed {
    fn new() -> Result<Self, DeviceError> {
        Ok(Self(result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING)?))
    }

    fn mark(&self, stream: CUstream) -> Result<(), DeviceError> {
        // SAFETY: the event is alive, and the stream is the ring's.
        unsafe { result::event::record(self.0, stream).map_err(Into::into) }
    }

    /// Returns at once if nothing was marked.
    fn wait(&self) -> Result<(), DeviceError> {
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.0).map_err(Into::into) }
    }
}

impl Drop for Passed {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}
