//! One checksum per expert slice, independent of the layout.

use std::fmt;

use super::error::ReshardError;
use super::layout::Pool;
use super::shape::check_equal;
use crate::hash::mix;

/// Identifies a slice of an expert in a layer, which has its own checksum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PieceId {
    /// Layer.
    pub layer: usize,
    /// Logical expert id.
    pub expert: u16,
    /// Slice of its width.
    pub slice: u16,
}

impl fmt::Display for PieceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {}, expert {}, slice {}", self.layer, self.expert, self.slice)
    }
}

/// Words summed in parallel.
const LANES: usize = 8;

/// Bytes per step of a [`PieceHash`].
pub(super) const HASH_BLOCK_BYTES: usize = LANES * 8;

/// Bytes copied at a time and then hashed while still in the L1 cache. A multiple of [`HASH_BLOCK_BYTES`].
pub(super) const PART_BYTES: usize = 16 << 10;

/// A checksum against corruption, not against tampering: each lane sums its words, and sums those running sums (a
/// 64-bit Fletcher checksum). A single changed word changes the first sum, two swapped words the second; several
/// changes go undetected only if both sums happen to be equal. The sums add no cost to a memory-bound copy.
#[derive(Clone, Copy, Debug)]
pub struct PieceHash {
    sums: [u64; LANES],
    totals: [u64; LANES],
    bytes: u64,
}

impl Default for PieceHash {
    fn default() -> Self {
        Self { sums: std::array::from_fn(|lane| 0x517c_c1b7_2722_0a95 ^ lane as u64), totals: [0; LANES], bytes: 0 }
    }
}

impl PieceHash {
    /// Adds a row. A row may be added in parts if all but the last are multiples of 64 bytes long.
    pub fn update(&mut self, bytes: &[u8]) {
        let (blocks, rest) = bytes.as_chunks::<HASH_BLOCK_BYTES>();
        for block in blocks {
            self.block(block);
        }
        if !rest.is_empty() {
            let mut last = [0; HASH_BLOCK_BYTES];
            last[..rest.len()].copy_from_slice(rest);
            self.block(&last);
        }
        self.bytes += bytes.len() as u64;
    }

    fn block(&mut self, block: &[u8; HASH_BLOCK_BYTES]) {
        let (words, _) = block.as_chunks::<8>();
        for ((sum, total), word) in self.sums.iter_mut().zip(&mut self.totals).zip(words) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
            *total = total.wrapping_add(*sum);
        }
    }

    /// Copies a row, or a part of one as in [`PieceHash::update`], and adds the bytes read. Full cache lines are
    /// written with non-temporal stores where supported, the fastest way to copy more data than fits in the caches.
    ///
    /// # Safety
    /// `bytes` bytes must be readable at `from` and writable at `to`, without overlap, and no other thread may write to
    /// the source or access the destination during the call.
    pub unsafe fn copy(&mut self, from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: upheld by the caller.
        let streamed = unsafe { self.stream(from, to, bytes) };
        for at in (streamed..bytes).step_by(PART_BYTES) {
            let part = PART_BYTES.min(bytes - at);
            // SAFETY: the access is within the row; the caller upholds the rest.
            let copied = unsafe {
                to.add(at).copy_from_nonoverlapping(from.add(at), part);
                std::slice::from_raw_parts(to.add(at), part)
            };
            self.update(copied);
        }
    }

    /// Copies and adds the full cache lines of a row with non-temporal stores; returns the number of bytes copied.
    ///
    /// # Safety
    /// See [`PieceHash::copy`].
    #[cfg(target_arch = "x86_64")]
    unsafe fn stream(&mut self, from: *const u8, to: *mut u8, bytes: usize) -> usize {
        use std::arch::x86_64::{__m128i, _mm_add_epi64, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
        const WORDS: usize = LANES / 2;
        if !to.addr().is_multiple_of(HASH_BLOCK_BYTES) || bytes < HASH_BLOCK_BYTES {
            return 0;
        }
        let whole = bytes / HASH_BLOCK_BYTES * HASH_BLOCK_BYTES;
        let mut sums: [__m128i; WORDS] = bytemuck::cast(self.sums);
        let mut totals: [__m128i; WORDS] = bytemuck::cast(self.totals);
        for at in (0..whole).step_by(HASH_BLOCK_BYTES) {
            for (lane, (sum, total)) in sums.iter_mut().zip(&mut totals).enumerate() {
                // SAFETY: the accesses are within both rows (upheld by the caller), and `to` is aligned to 16 bytes;
                // SSE2 is part of the architecture.
                unsafe {
                    let words = _mm_loadu_si128(from.add(at).cast::<__m128i>().add(lane));
                    _mm_stream_si128(to.add(at).cast::<__m128i>().add(lane), words);
                    *sum = _mm_add_epi64(*sum, words);
                    *total = _mm_add_epi64(*total, *sum);
                }
            }
        }
        // The fence orders the streamed stores before any later store that announces them. SAFETY: SSE is part of the
        // architecture.
        unsafe { _mm_sfence() };
        (self.sums, self.totals) = (bytemuck::cast(sums), bytemuck::cast(totals));
        self.bytes += whole as u64;
        whole
    }

    #[cfg(not(target_arch = "x86_64"))]
    unsafe fn stream(&mut self, _from: *const u8, _to: *mut u8, _bytes: usize) -> usize {
        0
    }

    /// The checksum, never 0.
    pub fn finish(&self) -> u64 {
        let hash = self.sums.iter().chain(&self.totals).fold(self.bytes, |hash, &lane| mix(hash, lane));
        (hash ^ (hash >> 32)).max(1)
    }
}

/// The checksums of all pieces, computed when the experts are loaded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Checksums {
    experts: usize,
    slices: usize,
    /// `[K, N, P]`, 0 if unknown
    words: Vec<u64>,
}

impl Checksums {
    /// Creates a table for a pool's experts in which every checksum is unknown. It takes 8 K N P bytes, with P slices
    /// per expert, one per rank of a node.
    pub fn new(pool: &Pool) -> Self {
        let (experts, slices) = (pool.experts(), pool.grid().width());
        Self { experts, slices, words: vec![0; pool.layers() * experts * slices] }
    }

    /// Returns the checksums, `[K, N, P]`, to be sent to other ranks; 0 if unknown.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Merges another rank's checksums, `[K, N, P]`.
    ///
    /// # Errors
    /// If the length differs, or the two ranks have different copies of a piece.
    pub fn merge(&mut self, words: &[u64]) -> Result<(), ReshardError> {
        check_equal("checksums", words.len(), self.words.len())?;
        for (index, &word) in words.iter().enumerate().filter(|(_, word)| **word != 0) {
            self.set(index, word)?;
        }
        Ok(())
    }

    /// Records one checksum.
    ///
    /// # Errors
    /// If a different checksum was recorded for the piece before.
    ///
    /// # Panics
    /// If there is no such piece.
    pub fn record(&mut self, piece: PieceId, hash: u64) -> Result<(), ReshardError> {
        self.set(self.index(piece), hash)
    }

    /// Returns the checksum that a piece must have.
    ///
    /// # Errors
    /// If the checksum is unknown.
    ///
    /// # Panics
    /// If there is no such piece.
    pub fn expected(&self, piece: PieceId) -> Result<u64, ReshardError> {
        match self.words[self.index(piece)] {
            0 => Err(ReshardError::Unknown(piece)),
            word => Ok(word),
        }
    }

    fn index(&self, piece: PieceId) -> usize {
        let (expert, slice) = (usize::from(piece.expert), usize::from(piece.slice));
        assert!(expert < self.experts && slice < self.slices, "no such piece: {piece}");
        (piece.layer * self.experts + expert) * self.slices + slice
    }

    fn set(&mut self, index: usize, found: u64) -> Result<(), ReshardError> {
        match self.words[index] {
            expected if expected != 0 && expected != found => {
                let (row, slice) = (index / self.slices, index % self.slices);
                let (layer, expert) = (row / self.experts, row % self.experts);
                let piece = PieceId { layer, expert: expert as u16, slice: slice as u16 };
                Err(ReshardError::Copies { piece, found, expected })
            }
            _ => {
                self.words[index] = found;
                Ok(())
            }
        }
    }
}
