//! Device memory, host words that survive a trap, memory of other processes, and events, for tools without a framework.

use std::ffi::c_void;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdeviceptr, CUevent, CUevent_flags, CUipcMemHandle, CUstream};

use super::DeviceError;
use crate::team::Buffer;

/// Device memory of this process; the GPU must be bound whenever the memory is used or dropped.
pub struct DeviceBuffer {
    pointer: CUdeviceptr,
    bytes: usize,
}

impl DeviceBuffer {
    /// Allocates uninitialised memory.
    ///
    /// # Errors
    /// If the driver refuses the call, for example because memory is exhausted.
    pub fn new(bytes: usize) -> Result<Self, DeviceError> {
        // SAFETY: freed in `drop`.
        let pointer = unsafe { result::malloc_sync(bytes.max(1))? };
        Ok(Self { pointer, bytes })
    }

    /// Allocates memory with every byte set to `byte`.
    ///
    /// # Errors
    /// If the driver refuses the call.
    pub fn filled(bytes: usize, byte: u8) -> Result<Self, DeviceError> {
        let buffer = Self::new(bytes)?;
        buffer.fill(byte)?;
        Ok(buffer)
    }

    /// Allocates memory and copies these bytes to it.
    ///
    /// # Errors
    /// If the driver refuses the call.
    pub fn holding(bytes: &[u8]) -> Result<Self, DeviceError> {
        let buffer = Self::new(bytes.len())?;
        buffer.write(bytes)?;
        Ok(buffer)
    }

    /// Sets every byte.
    ///
    /// # Errors
    /// If the driver refuses the call.
    pub fn fill(&self, byte: u8) -> Result<(), DeviceError> {
        // SAFETY: the memory belongs to this buffer.
        unsafe { result::memset_d8_sync(self.pointer, byte, self.bytes.max(1)).map_err(Into::into) }
    }

    /// Overwrites the first bytes. Panics if the buffer is too small.
    ///
    /// # Errors
    /// If the driver refuses the call.
    pub fn write(&self, bytes: &[u8]) -> Result<(), DeviceError> {
        assert!(bytes.len() <= self.bytes, "{} bytes exceed the buffer's {}", bytes.len(), self.bytes);
        // SAFETY: the memory belongs to this buffer and is large enough.
        unsafe { write(self.buffer(), bytes) }
    }

    /// Returns the contents, after all work on the default stream.
    ///
    /// # Errors
    /// If the driver refuses the call, or a kernel trapped before.
    pub fn read(&self) -> Result<Vec<u8>, DeviceError> {
        // SAFETY: the memory belongs to this buffer.
        unsafe { read(self.buffer(), self.bytes) }
    }

    /// Returns the buffer for calls.
    pub fn buffer(&self) -> Buffer {
        Buffer { address: self.pointer, bytes: self.bytes as u64 }
    }

    /// Returns a handle with which another process on this machine can map the memory.
    ///
    /// # Errors
    /// If the driver refuses the call.
    pub fn export(&self) -> Result<[u8; 64], DeviceError> {
        export(self.buffer())
    }
}

/// Returns a handle with which another process on this machine can map a [`DeviceBuffer`].
///
/// # Errors
/// If the driver refuses the call.
pub(super) fn export(memory: Buffer) -> Result<[u8; 64], DeviceError> {
    let mut handle = CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: the handle outlives the call; the driver refuses addresses that are not from cuMemAlloc.
    unsafe { sys::cuIpcGetMemHandle(&raw mut handle, memory.address).result()? };
    Ok(handle.reserved.map(|byte| byte as u8))
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, freed once; after a trap the driver refuses the call, and the context is gone
        // anyway.
        let _ = unsafe { result::free_sync(self.pointer) };
    }
}

/// Memory of another process, mapped here.
pub struct PeerBuffer {
    pointer: CUdeviceptr,
    bytes: u64,
}

impl PeerBuffer {
    /// Maps the memory for which [`DeviceBuffer::export`] returned `handle` in the other process; `bytes` is its size
    /// there.
    ///
    /// # Errors
    /// If the driver refuses the call, for example for a handle created by this process.
    pub fn open(handle: &[u8; 64], bytes: u64) -> Result<Self, DeviceError> {
        let handle = CUipcMemHandle { reserved: handle.map(|byte| byte as std::ffi::c_char) };
        let mut pointer = 0;
        let peer_access = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: the pointer outlives the call; an invalid handle is refused.
        unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut pointer, handle, peer_access).result()? };
        Ok(Self { pointer, bytes })
    }

    /// Returns the buffer for calls.
    pub fn buffer(&self) -> Buffer {
        Buffer { address: self.pointer, bytes: self.bytes }
    }
}

impl Drop for PeerBuffer {
    fn drop(&mut self) {
        // SAFETY: opened in `open`, closed once.
        let _ = unsafe { sys::cuIpcCloseMemHandle(self.pointer).result() };
    }
}

/// Host words that kernels write and that survive a trap.
pub struct HostWords {
    start: *mut u64,
    words: usize,
}

impl HostWords {
    /// Allocates zeroed words.
    ///
    /// # Errors
    /// If the driver refuses the call.
    pub fn new(words: usize) -> Result<Self, DeviceError> {
        let mut start: *mut c_void = std::ptr::null_mut();
        let mapped = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: the pointer outlives the call.
        unsafe { sys::cuMemHostAlloc(&raw mut start, words * 8, mapped).result()? };
        let start = start.cast::<u64>();
        // SAFETY: the memory was just allocated with this length.
        unsafe { start.write_bytes(0, words) };
        Ok(Self { start, words })
    }

    /// Returns each word as a buffer. Under unified addressing the GPU uses the same addresses.
    pub fn buffers(&self) -> Vec<Buffer> {
        (0..self.words).map(|word| Buffer { address: self.start as u64 + 8 * word as u64, bytes: 8 }).collect()
    }

    /// Returns a word as the kernel left it. Panics past the last word.
    pub fn read(&self, word: usize) -> u64 {
        assert!(word < self.words, "word {word} of {}", self.words);
        // SAFETY: the word is within the allocation; the read is volatile because a kernel may write the word.
        unsafe { self.start.add(word).read_volatile() }
    }
}

impl Drop for HostWords {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, freed once; after a trap the driver may refuse.
        let _ = unsafe { result::free_host(self.start.cast()) };
    }
}

/// A point in a stream whose time can be measured.
pub struct Event(CUevent);

impl Event {
    /// Marks the work launched on `stream` so far.
    ///
    /// # Errors
    /// If the driver refuses the call.
    ///
    /// # Safety
    /// `stream` must belong to the bound GPU.
    pub unsafe fn record(stream: CUstream) -> Result<Self, DeviceError> {
        let event = Self(result::event::create(CUevent_flags::CU_EVENT_DEFAULT)?);
        // SAFETY: the event is new, and the caller guarantees the stream.
        unsafe { result::event::record(event.0, stream)? };
        Ok(event)
    }

    /// Waits until this event is reached and returns the microseconds since `earlier`.
    ///
    /// # Errors
    /// If a kernel trapped.
    pub fn microseconds_since(&self, earlier: &Self) -> Result<f64, DeviceError> {
        // SAFETY: both events are alive.
        unsafe {
            result::event::synchronize(self.0)?;
            Ok(f64::from(result::event::elapsed(earlier.0, self.0)?) * 1000.0)
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created in `record`, destroyed once.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

/// Copies on the device, after earlier work on `stream`.
///
/// # Errors
/// If the driver refuses the call.
///
/// # Safety
/// Both buffers must have `bytes` bytes on the bound GPU until the copy ends, and `stream` must belong to it.
pub unsafe fn copy(from: Buffer, to: Buffer, bytes: usize, stream: CUstream) -> Result<(), DeviceError> {
    // SAFETY: upheld by the caller.
    unsafe { result::memcpy_dtod_async(to.address, from.address, bytes, stream).map_err(Into::into) }
}

/// Overwrites memory of the bound GPU.
///
/// # Errors
/// If the driver refuses the call.
///
/// # Safety
/// The buffer must be mapped there and have at least as many bytes.
pub unsafe fn write(to: Buffer, bytes: &[u8]) -> Result<(), DeviceError> {
    if bytes.is_empty() {
        return Ok(());
    }
    // SAFETY: upheld by the caller.
    unsafe { result::memcpy_htod_sync(to.address, bytes).map_err(Into::into) }
}

/// Reads the first bytes of memory of the bound GPU, after all work on the default stream.
///
/// # Errors
/// If the driver refuses the call.
///
/// # Safety
/// The buffer must be mapped there and have at least that many bytes.
pub unsafe fn read(from: Buffer, bytes: usize) -> Result<Vec<u8>, DeviceError> {
    let mut found = vec![0; bytes];
    if bytes > 0 {
        // SAFETY: upheld by the caller.
        unsafe { result::memcpy_dtoh_sync(&mut found, from.address)? };
    }
    Ok(found)
}

/// Waits for all work on the bound GPU.
///
/// # Errors
/// If a kernel trapped.
pub fn synchronize() -> Result<(), DeviceError> {
    Ok(result::ctx::synchronize()?)
}
