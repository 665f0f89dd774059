//! T in half precision, summed with vector instructions: half the memory of fixed point, so more rows stay in cache.

use half::f16;
use semmoe_tables::Score;

/// Number of shares per vector; row lengths are a multiple of it.
const LANES: usize = 8;
/// Number of rows summed in 32 bits before they are added to the totals; 255 * 2^24 < 2^32.
pub(crate) const ROWS_PER_BLOCK: usize = 255;

/// [V, ranks] shares from 0 to 1, for processors with half-precision conversion.
#[derive(Debug)]
pub(crate) struct HalfRows {
    ranks: usize,
    pub(crate) shares: Vec<f16>,
}

impl HalfRows {
    /// Creates empty rows; `None` if a row does not have 1, 2, 4 or 8 vectors, or the processor cannot convert half
    /// precision.
    pub(crate) fn new(ranks: usize) -> Option<Self> {
        ([8, 16, 32, 64].contains(&ranks) && can_convert()).then(|| Self { ranks, shares: Vec::new() })
    }

    /// Adds the rows of `ids` exactly, in units of 2^-24; `known` has a bit per row, set if the row prefers some rank.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn add(&self, ids: &[u32], known: &[u64], sums: &mut [u64], score: &mut Score) {
        let blocks = || ids.chunks(ROWS_PER_BLOCK);
        vectors::fetch(&self.shares, self.ranks, blocks().next().unwrap_or_default());
        for (ids, next) in blocks().zip(blocks().skip(1).chain([&[][..]])) {
            vectors::fetch(&self.shares, self.ranks, next);
            // SAFETY: `new` checked that the processor has both features.
            unsafe {
                match self.ranks {
                    8 => vectors::add::<1>(&self.shares, known, ids, sums, score),
                    16 => vectors::add::<2>(&self.shares, known, ids, sums, score),
                    32 => vectors::add::<4>(&self.shares, known, ids, sums, score),
                    _ => vectors::add::<8>(&self.shares, known, ids, sums, score),
                }
            }
        }
    }

    /// Unreachable: `new` returns `None`.
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn add(&self, _ids: &[u32], _known: &[u64], _sums: &mut [u64], _score: &mut Score) {}
}

#[cfg(target_arch = "x86_64")]
fn can_convert() -> bool {
    std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("f16c")
}

#[cfg(not(target_arch = "x86_64"))]
fn can_convert() -> bool {
    false
}

#[cfg(target_arch = "x86_64")]
mod vectors {
    use std::arch::x86_64::{
        __m256i, _MM_HINT_T0, _mm_prefetch, _mm_set_epi64x, _mm256_add_epi32, _mm256_cvtph_ps, _mm256_cvttps_epi32,
        _mm256_mul_ps, _mm256_set1_ps, _mm256_setzero_si256, _mm256_storeu_si256,
    };

    use half::f16;
    use semmoe_tables::Score;

    use super::LANES;

    /// Prefetches the rows of all these ids at once: they are scattered over T, so summing alone would overlap only a
    /// few cache misses at a time.
    pub(super) fn fetch(shares: &[f16], ranks: usize, ids: &[u32]) {
        for &id in ids {
            if let Some(first) = shares.get(id as usize * ranks) {
                // SAFETY: a prefetch reads nothing, and the address is inside the table.
                unsafe { _mm_prefetch::<_MM_HINT_T0>((&raw const *first).cast()) };
            }
        }
    }

    /// Adds at most [`super::ROWS_PER_BLOCK`] rows of `VECTORS` vectors each.
    #[target_feature(enable = "avx2,f16c")]
    pub(super) fn add<const VECTORS: usize>(
        shares: &[f16],
        known: &[u64],
        ids: &[u32],
        sums: &mut [u64],
        score: &mut Score,
    ) {
        let (rows, _) = shares.as_chunks::<LANES>().0.as_chunks::<VECTORS>();
        // Shares are multiples of 2^-24 up to 1, so they become integers up to 2^24 here without rounding.
        let one = _mm256_set1_ps((1 << 24) as f32);
        let mut block = [_mm256_setzero_si256(); VECTORS];
        let (mut tokens, mut knowing) = (0, 0);
        for &id in ids {
            let Some(row) = rows.get(id as usize) else { continue };
            tokens += 1;
            knowing += known.get(id as usize / 64).map_or(0, |bits| bits >> (id % 64) & 1);
            for (sum, vector) in block.iter_mut().zip(row) {
                let [low, high]: [i64; 2] = bytemuck::cast(vector.map(f16::to_bits));
                let shares = _mm256_cvtph_ps(_mm_set_epi64x(high, low));
                *sum = _mm256_add_epi32(*sum, _mm256_cvttps_epi32(_mm256_mul_ps(shares, one)));
            }
        }
        for (sums, block) in sums.chunks_exact_mut(LANES).zip(block) {
            sums.iter_mut().zip(numbers(block)).for_each(|(sum, block)| *sum += u64::from(block));
        }
        score.tokens += tokens;
        score.known += knowing;
    }

    #[target_feature(enable = "avx2")]
    fn numbers(vector: __m256i) -> [u32; LANES] {
        let mut numbers = [0; LANES];
        // SAFETY: the array has 32 bytes, and the store requires no alignment.
        unsafe { _mm256_storeu_si256((&raw mut numbers).cast(), vector) };
        numbers
    }
}
