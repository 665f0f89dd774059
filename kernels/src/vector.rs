//! Inner loops over one row, compiled from one source for the CPU's widest vectors, so results are bit-identical.

use crate::element::Element;
use crate::norm::inverse_rms;

/// Number of columns in a buffer that fits in the L1 cache.
const COLUMNS: usize = 1024;

/// Computes `out[c] = round(sum over q of rows[q][c])`, added in f32 in the order of q, starting with the first row;
/// zeros if there are no rows.
///
/// # Panics
/// If a row's length differs from `out`.
pub fn sum_rows<T: Element>(rows: &[&[T]], out: &mut [T]) {
    check(rows, out.len());
    sum(rows, out);
}

/// Computes `out[c] = sum over q of rows[q][c]` like [`sum_rows`], but without rounding.
///
/// # Panics
/// If a row's length differs from `out`.
pub fn sum_rows_wide<T: Element>(rows: &[&[T]], out: &mut [f32]) {
    check(rows, out.len());
    sum_wide(rows, out);
}

/// Operands of the fused residual and norm: `sum` is `[H]` and is overwritten with h = sum + residual.
#[derive(Debug)]
pub struct NormRow<'a, T> {
    /// `[H]`, f32, unrounded.
    pub sum: &'a mut [f32],
    /// `[H]`
    pub residual: &'a [T],
    /// `[H]`
    pub weight: &'a [T],
    /// Added to the mean of squares.
    pub epsilon: f32,
    /// `[H]`: round(h)
    pub residual_out: &'a mut [T],
    /// `[H]`: round((h x inverse_rms(h)) x weight)
    pub out: &'a mut [T],
}

/// Computes the residual and RMSNorm of one row, as defined by `reduce_scatter_norm` in `tests/reference`.
///
/// # Panics
/// If the slices differ in length.
pub fn norm_row<T: Element>(row: NormRow<'_, T>) {
    let width = row.sum.len();
    for found in [row.residual.len(), row.weight.len(), row.residual_out.len(), row.out.len()] {
        assert_eq!(found, width, "a row's slices must have equal lengths");
    }
    norm(row);
}

/// Prefetches a part of a row that is needed soon. Only a hint.
#[inline]
pub fn prefetch<T>(row: &[T]) {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        for at in (0..size_of_val(row)).step_by(64) {
            // SAFETY: the address is within the row; a prefetch reads nothing and cannot fault.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(row.as_ptr().cast::<i8>().add(at)) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = row;
}

fn check<T>(rows: &[&[T]], width: usize) {
    assert!(rows.iter().all(|row| row.len() == width), "every row must be as long as the sum");
}

/// Adds four rows at a time. With more rows, partial sums go through an f32 buffer.
#[inline(always)]
fn sum_into<T: Element, O: Copy>(rows: &[&[T]], out: &mut [O], round: impl Fn(f32) -> O) {
    match *rows {
        [] => out.fill(round(0.0)),
        [a] => out.iter_mut().zip(a).for_each(|(to, a)| *to = round(a.widen())),
        [a, b] => {
            for ((to, a), b) in out.iter_mut().zip(a).zip(b) {
                *to = round(a.widen() + b.widen());
            }
        }
        [a, b, c] => {
            for (((to, a), b), c) in out.iter_mut().zip(a).zip(b).zip(c) {
                *to = round(a.widen() + b.widen() + c.widen());
            }
        }
        [a, b, c, d] => {
            for ((((to, a), b), c), d) in out.iter_mut().zip(a).zip(b).zip(c).zip(d) {
                *to = round(a.widen() + b.widen() + c.widen() + d.widen());
            }
        }
        _ => sum_many(rows, out, round),
    }
}

#[inline(always)]
fn sum_many<T: Element, O: Copy>(rows: &[&[T]], out: &mut [O], round: impl Fn(f32) -> O) {
    let mut sums = [0.0f32; COLUMNS];
    for (chunk, out) in out.chunks_mut(COLUMNS).enumerate() {
        let sums = &mut sums[..out.len()];
        let piece = |row: usize| &rows[row][chunk * COLUMNS..][..out.len()];
        for ((((sum, a), b), c), d) in sums.iter_mut().zip(piece(0)).zip(piece(1)).zip(piece(2)).zip(piece(3)) {
            *sum = a.widen() + b.widen() + c.widen() + d.widen();
        }
        let mut next = 4;
        while next + 4 <= rows.len() {
            let [a, b, c, d] = [0, 1, 2, 3].map(|step| piece(next + step));
            for ((((sum, a), b), c), d) in sums.iter_mut().zip(a).zip(b).zip(c).zip(d) {
                *sum = *sum + a.widen() + b.widen() + c.widen() + d.widen();
            }
            next += 4;
        }
        for row in next..rows.len() {
            for (sum, a) in sums.iter_mut().zip(piece(row)) {
                *sum += a.widen();
            }
        }
        for (to, &mut sum) in out.iter_mut().zip(sums) {
            *to = round(sum);
        }
    }
}

#[inline(always)]
fn norm_into<T: Element>(row: NormRow<'_, T>) {
    let NormRow { sum, residual, weight, epsilon, residual_out, out } = row;
    for ((value, residual), to) in sum.iter_mut().zip(residual).zip(residual_out) {
        *value += residual.widen();
        *to = T::round(*value);
    }
    let scale = inverse_rms(sum, epsilon);
    for ((to, value), weight) in out.iter_mut().zip(sum).zip(weight) {
        *to = T::round((*value * scale) * weight.widen());
    }
}

/// Defines a function with AVX2 and AVX-512 variants and dispatches to the widest one that the CPU supports. The
/// standard library caches feature detection, so each check is a single load.
macro_rules! widest {
    ($($name:ident($($argument:ident: $type:ty),*) => $body:expr;)*) => {$(
        fn $name<T: Element>($($argument: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
                fn avx512<T: Element>($($argument: $type),*) {
                    $body
                }

                #[target_feature(enable = "avx2")]
                fn avx2<T: Element>($($argument: $type),*) {
                    $body
                }

                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                {
                    // SAFETY: the CPU has the features that the function is compiled for.
                    return unsafe { avx512($($argument),*) };
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: as above.
                    return unsafe { avx2($($argument),*) };
                }
            }
            $body
        }
    )*};
}

widest! {
    sum(rows: &[&[T]], out: &mut [T]) => sum_into(rows, out, T::round);
    sum_wide(rows: &[&[T]], out: &mut [f32]) => sum_into(rows, out, |value| value);
    norm(row: NormRow<'_, T>) => norm_into(row);
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use proptest::prelude::*;

    use super::{Element, NormRow, norm_into, norm_row, sum_into, sum_rows, sum_rows_wide};

    fn same<T: Element>(patterns: &[u32], rows: usize, width: usize, decode: impl Fn(u32) -> T) {
        let at = |i: usize| decode(patterns[i % patterns.len()].wrapping_mul(1 + i as u32 * 2));
        let data: Vec<Vec<T>> = (0..rows).map(|row| (0..width).map(|c| at(row * width + c)).collect()).collect();
        let rows: Vec<&[T]> = data.iter().map(Vec::as_slice).collect();
        let (mut found, mut expected) = (vec![T::zeroed(); width], vec![T::zeroed(); width]);
        sum_rows(&rows, &mut found);
        // The reference adds column by column.
        for (column, to) in expected.iter_mut().enumerate() {
            let one: Vec<&[T]> = rows.iter().map(|row| &row[column..=column]).collect();
            sum_into(&one, std::slice::from_mut(to), T::round);
        }
        assert_eq!(bytemuck::cast_slice::<_, u8>(&found), bytemuck::cast_slice::<_, u8>(&expected));
        same_norm(&rows, width);
    }

    fn same_norm<T: Element>(rows: &[&[T]], width: usize) {
        let Some(residual) = rows.first() else { return };
        let mut sum = vec![0.0; width];
        sum_rows_wide(rows, &mut sum);
        let mut answers = Vec::new();
        for run in [norm_row::<T>, norm_into::<T>] {
            let mut sum = sum.clone();
            let (mut residual_out, mut out) = (vec![T::zeroed(); width], vec![T::zeroed(); width]);
            let (weight, epsilon) = (residual, 1e-5);
            run(NormRow { sum: &mut sum, residual, weight, epsilon, residual_out: &mut residual_out, out: &mut out });
            answers.push((
                bytemuck::cast_slice::<_, u8>(&residual_out).to_vec(),
                bytemuck::cast_slice::<_, u8>(&out).to_vec(),
            ));
        }
        assert_eq!(answers[0], answers[1]);
    }

    proptest! {
        #[test]
        fn every_version_gives_the_same_bits(
            patterns in prop::collection::vec(any::<u32>(), 1..50), rows in 0usize..9, width in 0usize..200
        ) {
            same::<f32>(&patterns, rows, width, f32::from_bits);
            same::<f16>(&patterns, rows, width, |bits| f16::from_bits(bits as u16));
            same::<bf16>(&patterns, rows, width, |bits| bf16::from_bits(bits as u16));
        }
    }
}
