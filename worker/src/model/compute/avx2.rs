//! AVX2, with 256-bit vectors. A stripe is half a panel and each of its rows takes two vectors, so five rows of sums
//! fit in the sixteen registers.

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

/// Loads the first or second halves of words as f32.
///
/// # Safety
/// The CPU must support the instruction set, and one vector must be readable.
#[inline(always)]
unsafe fn load_halves(at: *const u32, step: usize) -> __m256 {
    // SAFETY: the caller upholds the safety contract.
    unsafe {
        let words: __m256i = _mm256_loadu_si256(at.cast());
        _mm256_castsi256_ps(match step {
            0 => _mm256_slli_epi32::<16>(words),
            _ => _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32.cast_signed())),
        })
    }
}
