//! Rows that peers read in place, for units whose ranks are threads, or processes on one host.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use memmap2::{MmapOptions, MmapRaw};
use semmoe_kernels::Element;
use semmoe_kernels::collectives::{Half, PeerRows, RowMemory, SharedRows};

use crate::communicator::check_world;
use crate::error::RankError;
use crate::span::ALIGNMENT;

/// One rank's two halves, and those of ranks within reach.
pub struct SharedHalves<T> {
    rank: usize,
    /// Elements per half.
    len: usize,
    own: [*mut T; 2],
    /// `[P]` for each half; null for ranks out of reach.
    parts: [Vec<SharedRows<T>>; 2],
    /// The owner of the memory.
    _memory: Box<dyn Any + Send>,
}

// SAFETY: any thread may use the memory that the pointers refer to; only `halves`, through `&mut self`, gives access to
// the part that this rank writes.
unsafe impl<T: Element> Send for SharedHalves<T> {}

/// Returns the size of both halves with `elements` elements each, where each half starts at a multiple of
/// [`ALIGNMENT`]; `None` on overflow.
#[must_use]
pub fn halves_bytes<T: Element>(elements: usize) -> Option<usize> {
    elements.checked_mul(size_of::<T>())?.checked_next_multiple_of(ALIGNMENT)?.checked_mul(2)
}

impl<T: Element> SharedHalves<T> {
    /// Creates a rank's end. `buffers[p]` is rank p's memory of [`halves_bytes`] bytes as mapped here, or null if out
    /// of reach.
    ///
    /// # Safety
    /// Non-null memory must be mapped at a multiple of [`ALIGNMENT`] for as long as `memory` lives, be zero at first,
    /// and be written only by such ends; each rank must have one end. All ends must be used by collectives that all
    /// ranks call in the same order, as specified in [`semmoe_kernels::collectives`].
    ///
    /// # Panics
    /// If the rank has no buffer of its own.
    #[must_use]
    pub unsafe fn new(rank: usize, buffers: &[*mut u8], elements: usize, memory: Box<dyn Any + Send>) -> Self {
        let half_bytes = halves_bytes::<T>(elements).expect("mapped memory has a valid size") / 2;
        assert!(!buffers[rank].is_null(), "a rank's own memory must not be null");
        let at = |buffer: *mut u8, half: usize| match buffer.is_null() {
            true => std::ptr::null_mut(),
            false => buffer.wrapping_add(half * half_bytes).cast::<T>(),
        };
        let parts = |half| buffers.iter().map(|&buffer| SharedRows::new(at(buffer, half), elements)).collect();
        let own = [at(buffers[rank], 0), at(buffers[rank], 1)];
        Self { rank, len: elements, own, parts: [parts(0), parts(1)], _memory: memory }
    }

    /// Creates the ends of `world` ranks that are threads of this process, in rank order. Ranks reach each other within
    /// simulated hosts of `host` ranks.
    ///
    /// # Errors
    /// If the world is invalid, hosts have no ranks, or memory cannot be allocated.
    pub fn on_hosts(world: usize, host: usize, elements: usize) -> Result<Vec<Self>, RankError> {
        check_world(world)?;
        check_world(host)?;
        let too_large = || RankError::memory(format_args!("{elements} elements on each of {world} ranks are too many"));
        let stride = halves_bytes::<T>(elements).ok_or_else(too_large)?;
        let bytes = stride.checked_mul(world).ok_or_else(too_large)?;
        let map: MmapRaw = MmapOptions::new().len(bytes.max(1)).map_anon().map_err(RankError::memory)?.into();
        let map = Arc::new(map);
        let end = |rank: usize| {
            let buffer = |peer: usize| match peer / host == rank / host {
                true => map.as_mut_ptr().wrapping_add(peer * stride),
                false => std::ptr::null_mut(),
            };
            let buffers: Vec<*mut u8> = (0..world).map(buffer).collect();
            // SAFETY: each rank has its own part of the map and one end, which keeps the map alive; pages and the
            // stride are aligned.
            unsafe { Self::new(rank, &buffers, elements, Box::new(Arc::clone(&map))) }
        };
        Ok((0..world).map(end).collect())
    }
}

impl<T: Element> RowMemory<T> for SharedHalves<T> {
    fn reaches(&self, peer: usize) -> bool {
        !self.parts[0][peer].is_null()
    }

    fn limit(&self) -> Option<usize> {
        Some(self.len)
    }

    fn halves(&mut self, half: Half, len: usize) -> (&mut [T], PeerRows<'_, T>) {
        assert!(len <= self.len, "{len} elements exceed the {} of a half", self.len);
        // SAFETY: the slice is within this rank's half (just checked), to which `&mut self` is the only access here; no
        // peer reads this half in this turn, and reads use the other half.
        let own = unsafe { std::slice::from_raw_parts_mut(self.own[half as usize], len) };
        (own, self.read(half.other()))
    }

    fn read(&self, half: Half) -> PeerRows<'_, T> {
        // Orders reads of memory that peers wrote before sending after the arrival of their messages, whatever the
        // transport.
        fence(Ordering::SeqCst);
        // SAFETY: the memory is mapped as long as `self` lives, and the collectives' turns prevent ranks from writing
        // memory that others read.
        unsafe { PeerRows::shared(&self.parts[half as usize]) }
    }
}

impl<T> std::fmt::Debug for SharedHalves<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedHalves").field("rank", &self.rank).field("len", &self.len).finish_non_exhaustive()
    }
}
