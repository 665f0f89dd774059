//! 256-bit vectors: a row of a stripe is two of them, half a panel's, so five rows of sums fit the sixteen registers.

use std::arch::x86_64::{
    __m256, __m256i, _mm256_and_si256, _mm256_castsi256_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256,
    _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_slli_epi32, _mm256_storeu_ps,
};

use super::pairs::pairs_of_vectors;
use super::tile::{Load, Vectors};

pairs_of_vectors! {
    Avx2, [__m256; 8], 5, |rows| match rows { 1 => 4, 2 => 2, _ => 1 },
    _mm256_setzero_ps, _mm256_set1_ps, _mm256_fmadd_ps, _mm256_storeu_ps, _mm256_loadu_ps
}

/// The first or second halves of words, as f32.
///
/// # Safety
/// The machine has the instruction set; one vector can be read.
#[inline(always)]
unsafe fn load_halves(at: *const u32, step: usize) -> __m256 {
    // SAFETY: the caller guarantees it.
    unsafe {
        let words: __m256i = _mm256_loadu_si256(at.cast());
        _mm256_castsi256_ps(match step {
            0 => _mm256_slli_epi32::<16>(words),
            _ => _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32.cast_signed())),
        })
    }
}
