//! Memory for kernels, exactly as long as requested, so that a sanitizer detects the first byte past its end.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};

use semmoe_kernels_cuda::Buffer;

/// Bytes aligned to 16.
pub struct HostBuffer {
    start: *mut u8,
    bytes: usize,
    layout: Layout,
}

// SAFETY: owns its allocation, which `&self` only reads; kernels write it as `bytes` says.
unsafe impl Send for HostBuffer {}
// SAFETY: as above.
unsafe impl Sync for HostBuffer {}

/// Content of fresh memory: a NaN in every element type, a negative index.
const POISON: u8 = 0xff;

impl HostBuffer {
    /// Poisoned memory.
    pub fn poisoned(bytes: usize) -> Self {
        let layout =
            Layout::from_size_align(bytes.max(1), 16).expect("test buffers are far smaller than the address space");
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc(layout) };
        if start.is_null() {
            handle_alloc_error(layout);
        }
        // SAFETY: the allocation has these bytes; every one is written before a slice is made.
        unsafe { start.write_bytes(POISON, layout.size()) };
        Self { start, bytes, layout }
    }

    /// Zeroed memory.
    pub fn zeroed(bytes: usize) -> Self {
        let mut buffer = Self::poisoned(bytes);
        buffer.bytes_mut().fill(0);
        buffer
    }

    /// A copy of `bytes`.
    pub fn holding(bytes: &[u8]) -> Self {
        let mut buffer = Self::poisoned(bytes.len());
        buffer.bytes_mut().copy_from_slice(bytes);
        buffer
    }

    /// Its address and size, for calls.
    pub fn buffer(&self) -> Buffer {
        Buffer { address: self.start as u64, bytes: self.bytes as u64 }
    }

    /// The content.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated and initialised in `poisoned`; kernels write to it only inside `Shim::run`, while nothing
        // borrows it.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    /// The content, mutably.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and freed once.
        unsafe { dealloc(self.start, self.layout) };
    }
}
