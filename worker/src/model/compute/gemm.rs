//! `C = A x B`, where B is divided into panels of [`NR`] columns, and panels are combined into groups.
//!
//! Each sum is accumulated in registers over all of k, with one fused multiply-add per element and step, so the order
//! of summation is ascending k for every tile shape. The loops are in `tile`.
//!
//! **One stream.** A product with few rows takes as long as reading B, and memory delivers its full bandwidth only when
//! it is read in order, as a single stream. The panels that a tile with few rows uses together, up to [`MAX_GROUP`],
//! are therefore interleaved row by row.

use rayon::iter::{IntoParallelIterator as _, ParallelIterator as _};

use super::isa::Isa;
use super::tile::{Ahead, Element, Job};
use crate::threads::threads_for;

/// Columns per panel.
pub(in crate::model) const NR: usize = 32;

/// Maximum number of panels per group.
const MAX_GROUP: usize = 4;

/// Prefetch distance for weights in bytes: far enough to cover several main memory latencies, near enough that
/// prefetched and current weights fit in the L1 cache together.
const AHEAD_BYTES: usize = 16 << 10;

/// An f32 matrix, `rows x width`, whose rows are `stride` elements apart.
#[derive(Clone, Copy)]
pub(in crate::model) struct Matrix<'a> {
    /// The elements.
    pub data: &'a [f32],
    /// Number of elements from one row to the next.
    pub stride: usize,
}

/// The sizes of a product: `[m, k] x [k, n]`.
#[derive(Clone, Copy)]
pub(in crate::model) struct Sizes {
    pub m: usize,
    pub k: usize,
    pub n: usize,
}

/// The right operand, `[k, n]`. Packed operands consist of groups of whole panels. A group has as many columns as
/// [`group_of`] returns, or fewer if several separately packed operands are adjacent.
#[derive(Clone, Copy)]
pub(in crate::model) enum Columns<'a> {
    /// Groups of `[k / 2 rounded up, columns]` words. Word j of row i belongs to column j; its low half is element 2 i,
    /// and its high half is element 2 i + 1 (0 past the end).
    Bf16 {
        /// The groups.
        words: &'a [u32],
        /// Columns per group.
        group: usize,
    },
    /// Groups of `[k, columns]`.
    F32 {
        /// The groups.
        values: &'a [f32],
        /// Columns per group.
        group: usize,
    },
    /// Row-major, `[k, stride]`; the stride is a multiple of [`NR`].
    Rows {
        /// The elements.
        matrix: Matrix<'a>,
        /// Data to prefetch because it will be read next. It is as long as the part of the matrix being read.
        next: Option<&'a [f32]>,
    },
}

/// Returns the columns per group of a packed right operand with n columns. All groups have the same number of whole
/// panels.
pub(in crate::model) fn group_of(n: usize) -> usize {
    let panels = n.div_ceil(NR);
    let mut group = MAX_GROUP;
    while !panels.is_multiple_of(group) {
        group /= 2;
    }
    group * NR
}

/// Writes `a [m, k] x b [k, n]` to `c [m, n]`, whose rows are `c_stride` elements apart.
///
/// # Panics
/// If a slice is too short for these sizes.
pub(in crate::model) fn multiply(sizes: Sizes, a: Matrix<'_>, b: Columns<'_>, c: &mut [f32], c_stride: usize) {
    multiply_from(Begin::AtZero, sizes, a, b, c, c_stride);
}

/// Writes or accumulates `a [m, k] x b [k, n]` to `c [m, n]`, whose rows are `c_stride` elements apart. [`Begin::AtC`]
/// continues the sums in `c`, so consecutive products over parts of k give exactly the sums of a single product over
/// all of k.
///
/// # Panics
/// If a slice is too short for these sizes.
pub(in crate::model) fn multiply_from(
    begin: Begin,
    sizes: Sizes,
    a: Matrix<'_>,
    b: Columns<'_>,
    c: &mut [f32],
    c_stride: usize,
) {
    multiply_on(Isa::best(), sizes, a, b, c, c_stride, begin);
}

/// Up to this many rows, a product is bound by reading B rather than by arithmetic.
const FEW_ROWS: usize = 4;

/// Bytes of a group that a product with few rows processes at a time if its tiles are narrower than the group: half of
/// the L1 cache, so that the other half can hold prefetched data.
const PIECE_BYTES: usize = 16 << 10;

/// The initial value of a sum.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::model) enum Begin {
    AtZero,
    /// The current value in C.
    AtC,
}

pub(super) fn multiply_on(
    isa: Isa,
    Sizes { m, k, n }: Sizes,
    a: Matrix<'_>,
    b: Columns<'_>,
    c: &mut [f32],
    c_stride: usize,
    begin: Begin,
) {
    if m == 0 || n == 0 {
        return;
    }
    assert!(k > 0 && k <= a.stride && n <= c_stride, "rows must not overlap");
    assert!((m - 1) * a.stride + k <= a.data.len(), "A is too short");
    assert!((m - 1) * c_stride + n <= c.len(), "C is too short");
    let (a, c, ahead) = ((a.data.as_ptr(), a.stride), (c.as_mut_ptr(), c_stride), Ahead::InStream(AHEAD_BYTES));
    // Returns the elements per group of a packed B, after checking that its `len` elements contain all groups.
    let packed_group = |len: usize, rows: usize, group: usize| {
        assert!(group > 0 && group.is_multiple_of(NR), "groups are whole panels");
        assert!(n.div_ceil(group) * rows * group <= len, "B is too short");
        rows * group
    };
    match b {
        Columns::Bf16 { words, group } => {
            let b_group = packed_group(words.len(), k.div_ceil(u32::STEPS), group);
            let job = Job { m, k, n, a, c, begin, ahead, b: words.as_ptr(), b_row: group, b_group, group };
            // SAFETY: the checks above guarantee that all three operands have the job's sizes.
            unsafe { launch(isa, &job) }
        }
        Columns::F32 { values, group } => {
            let b_group = packed_group(values.len(), k, group);
            let job = Job { m, k, n, a, c, begin, ahead, b: values.as_ptr(), b_row: group, b_group, group };
            // SAFETY: see above.
            unsafe { launch(isa, &job) }
        }
        Columns::Rows { matrix: Matrix { data, stride }, next } => {
            assert!(n.next_multiple_of(NR) <= stride && k * stride <= data.len(), "B is too short");
            let distance = |next: &[f32]| next.as_ptr().addr().wrapping_sub(data.as_ptr().addr());
            let ahead = Ahead::Elsewhere(next.map_or(0, distance));
            let job = Job { m, k, n, a, c, begin, ahead, b: data.as_ptr(), b_row: stride, b_group: 0, group: stride };
            // SAFETY: see above.
            unsafe { launch(isa, &job) }
        }
    }
}

/// A job shared by threads that read the same operands and write disjoint columns.
struct Shared<'a, E>(&'a Job<E>);

// SAFETY: everything behind the job's pointers is borrowed while the threads run. A and B are only read, and `launch`
// assigns different columns of C to different threads.
unsafe impl<E> Sync for Shared<'_, E> {}

/// Processes one group after another, and within a group a few rows of B at a time, so that B is read in memory order.
///
/// # Safety
/// `isa` must be available, and all operands must have the job's sizes.
unsafe fn run_in_pieces<E: Element>(isa: Isa, job: &Job<E>) {
    let step = PIECE_BYTES / (job.b_row * size_of::<E>()) * E::STEPS;
    for column in (0..job.n).step_by(job.group) {
        for k in (0..job.k).step_by(step) {
            // SAFETY: the caller upholds the safety contract, `column` is the first one of a group, and each step
            // covers whole rows of B.
            unsafe {
                let piece = job.piece(column, k..job.k.min(k + step));
                E::run(isa, &piece, 0..piece.n.div_ceil(NR));
            }
        }
    }
}

/// # Safety
/// `isa` must be available, and all operands must have the job's sizes.
unsafe fn launch<E: Element>(isa: Isa, job: &Job<E>) {
    let panels = job.n.div_ceil(NR);
    let parts = threads_for(job.m.saturating_mul(job.k).saturating_mul(job.n)).min(panels);
    if parts == 1 {
        let in_pieces = job.m <= FEW_ROWS && isa.has_narrow_tiles() && matches!(job.ahead, Ahead::InStream(_));
        // SAFETY: the caller upholds the safety contract.
        return unsafe { if in_pieces { run_in_pieces(isa, job) } else { E::run(isa, job, 0..panels) } };
    }
    let shared = Shared(job);
    (0..parts).into_par_iter().for_each(|part| {
        // Makes the closure capture the whole `Shared`, which is `Sync`, rather than the job inside, which is not.
        let shared = &shared;
        // SAFETY: the caller upholds the safety contract, and the panels belong to this job and to no other part of it.
        unsafe { E::run(isa, shared.0, panels * part / parts..panels * (part + 1) / parts) };
    });
}

#[cfg(test)]
#[path = "gemm_tests.rs"]
mod tests;
