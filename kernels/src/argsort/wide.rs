//! Counting sort that processes 16 items at a time, for few ranks: a compare finds a rank's items, a compress writes
//! them contiguously, and an expand gives each its position. This avoids gathers and scatters, which are slow.

use core::arch::x86_64::{
    __m256i, __m512i, __mmask16, _mm256_loadu_si256, _mm512_add_epi32, _mm512_cmpeq_epi32_mask, _mm512_cvtepu16_epi32,
    _mm512_loadu_si512, _mm512_mask_expand_epi32, _mm512_mask_storeu_epi32, _mm512_maskz_compress_epi32,
    _mm512_set1_epi32, _mm512_setr_epi32, _mm512_setzero_si512,
};

use super::{Destination, place as place_each};

/// Maximum number of ranks for which this is faster than sorting item by item.
pub(super) const MAX_RANKS: usize = 8;
const LANES: usize = 16;

/// Whether the CPU supports this sort.
pub(super) fn available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("popcnt")
}

/// Fills all three outputs; returns false if a destination is out of range.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,popcnt")]
pub(super) fn sort<D: Destination>(
    destinations: &[D],
    permutation: &mut [u32],
    inverse: &mut [u32],
    offsets: &mut [u32],
) -> bool {
    let fits = count(destinations, offsets);
    if fits {
        place(destinations, offsets, permutation, inverse);
    }
    fits
}

/// Fills `offsets`, `[ranks + 1]`. Returns false if a destination is out of range: the counts then do not add up to the
/// number of items.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,popcnt")]
fn count<D: Destination>(destinations: &[D], offsets: &mut [u32]) -> bool {
    let ranks = offsets.len() - 1;
    let mut counts = [0u32; MAX_RANKS];
    let (chunks, rest) = destinations.as_chunks::<LANES>();
    for chunk in chunks {
        let chunk = load(chunk);
        for (rank, count) in counts.iter_mut().enumerate().take(ranks) {
            *count += _mm512_cmpeq_epi32_mask(chunk, _mm512_set1_epi32(rank as i32)).count_ones();
        }
    }
    for destination in rest {
        match counts[..ranks].get_mut(destination.index()) {
            Some(count) => *count += 1,
            None => return false,
        }
    }
    offsets[0] = 0;
    for rank in 0..ranks {
        offsets[rank + 1] = offsets[rank] + counts[rank];
    }
    offsets[ranks] as usize == destinations.len()
}

/// Fills `permutation` and `inverse`, each `[n]`, using the offsets of [`count`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,popcnt")]
fn place<D: Destination>(destinations: &[D], offsets: &[u32], permutation: &mut [u32], inverse: &mut [u32]) {
    let (n, ranks) = (destinations.len(), offsets.len() - 1);
    assert!(permutation.len() == n && inverse.len() == n && ranks <= MAX_RANKS, "slices must have n items");
    let iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let mut cursors = [0u32; MAX_RANKS];
    cursors[..ranks].copy_from_slice(&offsets[..ranks]);
    let (chunks, rest) = destinations.as_chunks::<LANES>();
    for (index, chunk) in chunks.iter().enumerate() {
        let (at, chunk) = (index * LANES, load(chunk));
        let items = _mm512_add_epi32(iota, _mm512_set1_epi32(at as i32));
        let mut positions = _mm512_setzero_si512();
        for (rank, cursor) in cursors.iter_mut().enumerate().take(ranks) {
            let mine = _mm512_cmpeq_epi32_mask(chunk, _mm512_set1_epi32(rank as i32));
            let (first, count) = (*cursor as usize, mine.count_ones());
            let packed = _mm512_maskz_compress_epi32(mine, items);
            // SAFETY: only `count` lanes are written. A rank's cursor advances by the number of items that the function
            // `count` found for the rank, so it stays within 0..n.
            unsafe { _mm512_mask_storeu_epi32(permutation.as_mut_ptr().add(first).cast(), first_lanes(count), packed) };
            let following = _mm512_add_epi32(iota, _mm512_set1_epi32(first as i32));
            positions = _mm512_mask_expand_epi32(positions, mine, following);
            *cursor += count;
        }
        // SAFETY: the chunk's 16 items are below n.
        unsafe { _mm512_mask_storeu_epi32(inverse.as_mut_ptr().add(at).cast(), __mmask16::MAX, positions) };
    }
    let done = chunks.len() * LANES;
    place_each((done..).zip(rest), &mut cursors, permutation, inverse);
}

/// Loads 16 destinations as 32-bit lanes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn load<D: Destination>(chunk: &[D; LANES]) -> __m512i {
    // SAFETY: reads exactly the bytes of the chunk; destinations can only be u16 or u32, as the trait is sealed.
    unsafe {
        match size_of::<D>() {
            2 => _mm512_cvtepu16_epi32(_mm256_loadu_si256(chunk.as_ptr().cast::<__m256i>())),
            _ => _mm512_loadu_si512(chunk.as_ptr().cast::<__m512i>()),
        }
    }
}

/// Returns a mask of the first `count` lanes; `count` is at most 16.
#[inline(always)]
fn first_lanes(count: u32) -> __mmask16 {
    ((1u32 << count) - 1) as __mmask16
}
