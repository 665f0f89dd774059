//! Plain loops, which the compiler turns into whatever vectors it may assume.

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
        // SAFETY: `at` can be read, by the caller.
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
        // SAFETY: NR elements can be written, by the caller.
        unsafe { std::ptr::copy_nonoverlapping(row.as_ptr(), to, NR) }
    }
}

impl Load<f32> for Portable {
    const STEPS: usize = 1;

    #[inline(always)]
    unsafe fn load(at: *const f32, _step: usize) -> Self::Row {
        // SAFETY: NR elements can be read, by the caller; an array of f32 is aligned as an f32 is.
        unsafe { *at.cast::<[f32; NR]>() }
    }
}

impl Load<u32> for Portable {
    const STEPS: usize = 2;

    #[inline(always)]
    unsafe fn load(at: *const u32, step: usize) -> Self::Row {
        // SAFETY: NR words can be read, by the caller; an array of u32 is aligned as a u32 is.
        let words = unsafe { *at.cast::<[u32; NR]>() };
        words.map(|word| f32::from_bits(if step == 0 { word << 16 } else { word & 0xffff_0000 }))
    }
}
