//! Plain loops that the compiler vectorises for its baseline instruction set.

use super::gemm::NR;
use super::tile::{Load, Vectors};

pub(super) struct Portable;

impl Vectors for Portable {
    const WIDTH: usize = NR;
    type Row = [f32; NR];
    type Splat = f32;
    const MAX_ROWS: usize = 1;

    #[inline(always)]
    fn stripes_for(_rows: usize) -> usize {
        1
    }

    #[inline(always)]
    unsafe fn zero() -> Self::Row {
        [0.0; NR]
    }

    #[inline(always)]
    unsafe fn splat(at: *const f32) -> Self::Splat {
        // SAFETY: the caller guarantees that `at` is readable.
        unsafe { *at }
    }

    #[inline(always)]
    unsafe fn add_product(sum: &mut Self::Row, a: Self::Splat, b: Self::Row) {
        for (sum, b) in sum.iter_mut().zip(b) {
            *sum += a * b;
        }
    }

    #[inline(always)]
    unsafe fn store(row: Self::Row, to: *mut f32) {
        // SAFETY: the caller guarantees that NR elements are writable.
        unsafe { std::ptr::copy_nonoverlapping(row.as_ptr(), to, NR) }
    }
}

impl Load<f32> for Portable {
    const STEPS: usize = 1;

    #[inline(always)]
    unsafe fn load(at: *const f32, _step: usize) -> Self::Row {
        // SAFETY: the caller guarantees that NR elements are readable; an array of f32 is aligned like an f32.
        unsafe { *at.cast::<[f32; NR]>() }
    }
}

impl Load<u32> for Portable {
    const STEPS: usize = 2;

    #[inline(always)]
    unsafe fn load(at: *const u32, step: usize) -> Self::Row {
        // SAFETY: the caller guarantees that NR words are readable; an array of u32 is aligned like a u32.
        let words = unsafe { *at.cast::<[u32; NR]>() };
        words.map(|word| f32::from_bits(if step == 0 { word << 16 } else { word & 0xffff_0000 }))
    }
}
