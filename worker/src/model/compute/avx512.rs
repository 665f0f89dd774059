//! 512-bit vectors: a stripe is a panel, and a row of it two of them.

use std::arch::x86_64::{
    __m512, _mm512_castsi512_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_maskz_loadu_epi16,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_slli_epi32, _mm512_storeu_ps,
};

use super::gemm::NR;
use super::tile::{Load, Vectors};

pub(super) struct Avx512;

/// Of each word the second of its two halves.
const HIGH_HALVES: u32 = 0xaaaa_aaaa;

impl Vectors for Avx512 {
    const WIDTH: usize = NR;
    type Row = [__m512; 2];
    type Splat = __m512;
    const MAX_ROWS: usize = 6;

    #[inline(always)]
    fn stripes_for(rows: usize) -> usize {
        if rows <= 3 { 4 } else { 2 }
    }

    #[inline(always)]
    unsafe fn zero() -> Self::Row {
        // SAFETY: the machine has AVX-512, by the caller.
        unsafe { [_mm512_setzero_ps(); 2] }
    }

    #[inline(always)]
    unsafe fn splat(at: *const f32) -> Self::Splat {
        // SAFETY: as above, and `at` can be read.
        unsafe { _mm512_set1_ps(*at) }
    }

    #[inline(always)]
    unsafe fn add_product(sum: &mut Self::Row, a: Self::Splat, b: Self::Row) {
        // SAFETY: as above.
        unsafe {
            sum[0] = _mm512_fmadd_ps(a, b[0], sum[0]);
            sum[1] = _mm512_fmadd_ps(a, b[1], sum[1]);
        }
    }

    #[inline(always)]
    unsafe fn store(row: Self::Row, to: *mut f32) {
        // SAFETY: as above, and NR elements can be written.
        unsafe {
            _mm512_storeu_ps(to, row[0]);
            _mm512_storeu_ps(to.add(16), row[1]);
        }
    }
}

impl Load<f32> for Avx512 {
    const STEPS: usize = 1;

    #[inline(always)]
    unsafe fn load(at: *const f32, _step: usize) -> Self::Row {
        // SAFETY: the machine has AVX-512 and NR elements can be read, by the caller.
        unsafe { [_mm512_loadu_ps(at), _mm512_loadu_ps(at.add(16))] }
    }
}

impl Load<u32> for Avx512 {
    const STEPS: usize = 2;

    #[inline(always)]
    unsafe fn load(at: *const u32, step: usize) -> Self::Row {
        // SAFETY: the machine has AVX-512 and NR words can be read, by the caller.
        unsafe { [load_halves(at, step), load_halves(at.add(16), step)] }
    }
}

/// The first or second halves of words, as f32.
///
/// # Safety
/// As [`Load::load`], for one vector.
#[inline(always)]
unsafe fn load_halves(at: *const u32, step: usize) -> __m512 {
    // SAFETY: by the caller.
    unsafe {
        _mm512_castsi512_ps(match step {
            0 => _mm512_slli_epi32::<16>(_mm512_loadu_si512(at.cast())),
            // A load of its own, which no register has to keep the words for.
            _ => _mm512_maskz_loadu_epi16(HIGH_HALVES, at.cast()),
        })
    }
}
