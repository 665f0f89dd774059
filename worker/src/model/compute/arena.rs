//! Large allocations for data that every step reads: weights and KV cache pages.
//!
//! A heap allocation of a few hundred kilobytes uses small pages, each of which takes a TLB entry, and allocations that
//! are read one after another end up scattered. An arena is a single mapping with huge pages, whose pieces are
//! contiguous in allocation order.

use std::alloc::{Layout, handle_alloc_error};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use bytemuck::Pod;
use memmap2::MmapMut;

/// Alignment of every piece: a small page, and therefore also a cache line.
const GRAIN: usize = 4096;

/// A mapping from which pieces are allocated.
#[derive(Debug)]
pub(in crate::model) struct Arena {
    map: Arc<MmapMut>,
    /// The mapping's first byte, obtained while the mapping was mutable.
    base: *mut u8,
    /// Bytes allocated to pieces; a multiple of [`GRAIN`].
    used: usize,
}

// SAFETY: `base` points into the mapping, which any thread may access, and only `take` uses it, through `&mut self`.
unsafe impl Send for Arena {}
// SAFETY: `base` is never accessed through a shared reference.
unsafe impl Sync for Arena {}

/// An exclusively owned part of an arena, initially zero.
#[derive(Debug)]
pub(in crate::model) struct Piece<T> {
    at: NonNull<T>,
    len: usize,
    /// Keeps the mapping alive.
    map: Arc<MmapMut>,
    owned: PhantomData<T>,
}

// SAFETY: like a `Box`, a piece owns its elements exclusively.
unsafe impl<T: Send> Send for Piece<T> {}
// SAFETY: see above.
unsafe impl<T: Sync> Sync for Piece<T> {}

impl Arena {
    /// Creates an arena of at least this many bytes. A failed allocation aborts the process, as with `Vec`.
    pub(in crate::model) fn new(bytes: usize) -> Self {
        let bytes = bytes.max(1).next_multiple_of(GRAIN);
        let Ok(mut map) = MmapMut::map_anon(bytes) else {
            handle_alloc_error(Layout::from_size_align(bytes, GRAIN).unwrap_or_else(|_| Layout::new::<u8>()));
        };
        // This is only a hint: without huge pages everything still works, but more slowly.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        let base = map.as_mut_ptr();
        Self { map: Arc::new(map), base, used: 0 }
    }

    /// Bytes that a piece of `len` elements occupies in an arena.
    pub(in crate::model) fn bytes_of<T>(len: usize) -> usize {
        len.saturating_mul(size_of::<T>()).checked_next_multiple_of(GRAIN).unwrap_or(usize::MAX)
    }

    /// Allocates the next piece, or returns `None` if too little space is left.
    pub(in crate::model) fn take<T: Pod>(&mut self, len: usize) -> Option<Piece<T>> {
        const { assert!(align_of::<T>() <= GRAIN) };
        let bytes = Self::bytes_of::<T>(len);
        if bytes > self.map.len() - self.used {
            return None;
        }
        // SAFETY: `used` is at most the mapping's length.
        let at = unsafe { self.base.add(self.used) };
        self.used += bytes;
        let at = NonNull::new(at.cast::<T>())?;
        Some(Piece { at, len, map: Arc::clone(&self.map), owned: PhantomData })
    }
}

impl<T: Pod> Piece<T> {
    /// Zeroes all elements and returns their memory to the system until they are written again.
    pub(in crate::model) fn release(&mut self) {
        #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
        {
            let from = self.at.as_ptr() as usize - self.map.as_ptr() as usize;
            let bytes = Arena::bytes_of::<T>(self.len);
            // SAFETY: the bytes are whole pages that belong only to this piece, and zero is valid for every Pod type.
            let done = unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, from, bytes) };
            if done.is_ok() {
                return;
            }
        }
        self.fill(T::zeroed());
    }
}

impl<T> Deref for Piece<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the piece keeps the mapping alive, its elements are initialised (zero or written through it), and
        // nothing else refers to them.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for Piece<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and the piece is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_zero_apart_and_outlive_the_arena() {
        let mut arena = Arena::new(3 * GRAIN);
        let mut first = arena.take::<f32>(1000).unwrap();
        let mut second = arena.take::<u32>(GRAIN / 4 + 1).unwrap();
        assert!(arena.take::<u8>(1).is_none(), "the rest is too small for a grain");
        drop(arena);
        assert!(first.iter().all(|value| *value == 0.0) && second.iter().all(|value| *value == 0));
        first.fill(1.5);
        second.fill(7);
        assert_eq!((first.len(), second.len()), (1000, GRAIN / 4 + 1));
        assert!(first.iter().all(|value| *value == 1.5) && second.iter().all(|value| *value == 7));
    }

    #[test]
    fn a_released_piece_is_zero_and_its_neighbours_are_as_they_were() {
        let mut arena = Arena::new(8 * GRAIN);
        let mut pieces: Vec<Piece<u32>> = (0..3).map(|_| arena.take(GRAIN / 2 - 5).unwrap()).collect();
        pieces.iter_mut().for_each(|piece| piece.fill(9));
        pieces[1].release();
        assert!(pieces[1].iter().all(|value| *value == 0));
        pieces[1].fill(3);
        for (piece, expected) in pieces.iter().zip([9, 3, 9]) {
            assert!(piece.iter().all(|value| *value == expected));
        }
    }

    #[test]
    fn a_piece_of_nothing_and_one_of_too_much() {
        let mut arena = Arena::new(0);
        assert!(arena.take::<f32>(0).unwrap().is_empty());
        assert!(arena.take::<f32>(usize::MAX).is_none());
    }
}
