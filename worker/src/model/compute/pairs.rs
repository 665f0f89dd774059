//! The x86 instruction sets, for which each stripe row consists of two vectors.

/// Implements `Vectors` and `Load` given an instruction set's vector type, lane count, `MAX_ROWS`, `stripes_for` and
/// intrinsics. The calling module must provide `load_halves`, which loads the first or second halves of words as f32.
macro_rules! pairs_of_vectors {
    (
        $set:ident, [$vector:ident; $lanes:literal], $max_rows:literal, $stripes_for:expr,
        $zero:ident, $splat:ident, $add_product:ident, $store:ident, $load:ident
    ) => {
        pub(super) struct $set;

        impl Vectors for $set {
            const WIDTH: usize = 2 * $lanes;
            type Row = [$vector; 2];
            type Splat = $vector;
            const MAX_ROWS: usize = $max_rows;

            #[inline(always)]
            fn stripes_for(rows: usize) -> usize {
                $stripes_for(rows)
            }

            #[inline(always)]
            unsafe fn zero() -> Self::Row {
                // SAFETY: the caller guarantees that the CPU supports the instruction set.
                unsafe { [$zero(); 2] }
            }

            #[inline(always)]
            unsafe fn splat(at: *const f32) -> Self::Splat {
                // SAFETY: the caller guarantees the instruction set, and that `at` is readable.
                unsafe { $splat(*at) }
            }

            #[inline(always)]
            unsafe fn add_product(sum: &mut Self::Row, a: Self::Splat, b: Self::Row) {
                // SAFETY: the caller guarantees the instruction set, which includes FMA.
                unsafe { *sum = [$add_product(a, b[0], sum[0]), $add_product(a, b[1], sum[1])] }
            }

            #[inline(always)]
            unsafe fn store(row: Self::Row, to: *mut f32) {
                // SAFETY: the caller guarantees the instruction set, and that WIDTH elements are writable.
                unsafe {
                    $store(to, row[0]);
                    $store(to.add($lanes), row[1]);
                }
            }
        }

        impl Load<f32> for $set {
            const STEPS: usize = 1;

            #[inline(always)]
            unsafe fn load(at: *const f32, _step: usize) -> Self::Row {
                // SAFETY: the caller guarantees the instruction set, and that WIDTH elements are readable.
                unsafe { [$load(at), $load(at.add($lanes))] }
            }
        }

        impl Load<u32> for $set {
            const STEPS: usize = 2;

            #[inline(always)]
            unsafe fn load(at: *const u32, step: usize) -> Self::Row {
                // SAFETY: the caller guarantees the instruction set, and that WIDTH words are readable.
                unsafe { [load_halves(at, step), load_halves(at.add($lanes), step)] }
            }
        }
    };
}

pub(super) use pairs_of_vectors;
