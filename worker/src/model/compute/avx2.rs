//! 256-bit vectors: a row of a stripe is two of them, half a panel's, so that five rows of sums fit the sixteen
//! registers.

use std::arch::x86_64::{
    __m256, __m256i, _mm256_and_si256, _mm256_castsi256_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256,
    _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_slli_epi32, _mm256_storeu_ps,
};

use super::tile::{Load, Vectors};

pub(super) struct Avx2;

impl Vectors for Avx2 {
    const WIDTH: usize = 16;
    type Row = [__m256; 2];
    type Splat = __m256;
    const MAX_ROWS: usize = 5;

    #[inline(always)]
    fn stripes_for(rows: usize) -> usize {
        match rows {
            1 => 4,
            2 => 2,
            _ => 1,
        }
    }

    #[inline(always)]
    unsafe fn zero() -> Self::Row {
        // SAFETY: the machine has AVX2, by the caller.
        unsafe { [_mm256_setzero_ps(); 2] }
    }

    #[inline(always)]
    unsafe fn splat(at: *const f32) -> Self::Splat {
        // SAFETY: as above, and `at` can be read.
        unsafe { _mm256_set1_ps(*at) }
    }

    #[inline(always)]
    unsafe fn add_product(sum: &mut Self::Row, a: Self::Splat, b: Self::Row) {
        // SAFETY: the machine has FMA, by the caller.
        unsafe {
            sum[0] = _mm256_fmadd_ps(a, b[0], sum[0]);
            sum[1] = _mm256_fmadd_ps(a, b[1], sum[1]);
        }
    }

    #[inline(always)]
    unsafe fn store(row: Self::Row, to: *mut f32) {
        // SAFETY: the machine has AVX2 and WIDTH elements can be written, by the caller.
        unsafe {
            _mm256_storeu_ps(to, row[0]);
            _mm256_storeu_ps(to.add(8), row[1]);
        }
    }
}

impl Load<f32> for Avx2 {
    const STEPS: usize = 1;

    #[inline(always)]
    unsafe fn load(at: *const f32, _step: usize) -> Self::Row {
        // SAFETY: the machine has AVX2 and WIDTH elements can be read, by the caller.
        unsafe { [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))] }
    }
}

impl Load<u32> for Avx2 {
    const STEPS: usize = 2;

    #[inline(always)]
    unsafe fn load(at: *const u32, step: usize) -> Self::Row {
        // SAFETY: the machine has AVX2 and WIDTH words can be read, by the caller.
        unsafe { [load_halves(at, step), load_halves(at.add(8), step)] }
    }
}

/// The first or second halves of words, as f32.
///
/// # Safety
/// As [`Load::load`], for one vector.
#[inline(always)]
unsafe fn load_halves(at: *const u32, step: usize) -> __m256 {
    // SAFETY: by the caller.
    unsafe {
        let words: __m256i = _mm256_loadu_si256(at.cast());
        _mm256_castsi256_ps(match step {
            0 => _mm256_slli_epi32::<16>(words),
            _ => _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32.cast_signed())),
        })
    }
}
