//! 512-bit vectors: a row of a panel is two of them.

use std::arch::x86_64::{
    __m512, __m512i, _mm512_and_si512, _mm512_castsi512_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_slli_epi32, _mm512_storeu_ps,
};

use super::gemm::{Load, Vectors};

pub(super) struct Avx512;

impl Vectors for Avx512 {
    type Row = [__m512; 2];
    type Splat = __m512;
    const MAX_ROWS: usize = 8;

    #[inline(always)]
    fn panels_for(rows: usize) -> usize {
        match rows {
            1 | 2 => 4,
            3 | 4 => 2,
            _ => 1,
        }
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
    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self::Row {
        // SAFETY: the machine has AVX-512 and NR elements can be read, by the caller.
        unsafe { [_mm512_loadu_ps(at), _mm512_loadu_ps(at.add(16))] }
    }
}

impl Load<u32> for Avx512 {
    #[inline(always)]
    unsafe fn load(at: *const u32) -> Self::Row {
        // SAFETY: the machine has AVX-512 and NR / 2 words can be read, by the caller.
        unsafe {
            let words: __m512i = _mm512_loadu_si512(at.cast());
            let low = _mm512_slli_epi32::<16>(words);
            let high = _mm512_and_si512(words, _mm512_set1_epi32(0xffff_0000_u32.cast_signed()));
            [_mm512_castsi512_ps(low), _mm512_castsi512_ps(high)]
        }
    }
}
