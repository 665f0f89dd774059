//! AVX-512, with 512-bit vectors. A stripe is a whole panel, and each of its rows takes two vectors.

use std::arch::x86_64::{
    __m512, _mm512_castsi512_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_maskz_loadu_epi16,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_slli_epi32, _mm512_storeu_ps,
};

use super::pairs::pairs_of_vectors;
use super::tile::{Load, Vectors};

/// Selects the second half of each word.
const HIGH_HALVES: u32 = 0xaaaa_aaaa;

pairs_of_vectors! {
    Avx512, [__m512; 16], 6, |rows| if rows <= 3 { 4 } else { 2 },
    _mm512_setzero_ps, _mm512_set1_ps, _mm512_fmadd_ps, _mm512_storeu_ps, _mm512_loadu_ps
}

/// Loads the first or second halves of words as f32.
///
/// # Safety
/// The CPU must support the instruction set, and one vector must be readable.
#[inline(always)]
unsafe fn load_halves(at: *const u32, step: usize) -> __m512 {
    // SAFETY: the caller upholds the safety contract.
    unsafe {
        _mm512_castsi512_ps(match step {
            0 => _mm512_slli_epi32::<16>(_mm512_loadu_si512(at.cast())),
            // The words are loaded again so that no register has to hold them between the two steps.
            _ => _mm512_maskz_loadu_epi16(HIGH_HALVES, at.cast()),
        })
    }
}
