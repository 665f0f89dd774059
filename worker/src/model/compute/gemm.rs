//! `C = A x B`, where B consists of panels of [`NR`] columns, and panels form groups.
//!
//! Each sum is accumulated in registers over all of k, with one fused multiply-add per element and step, so its order
//! is k ascending for every tile shape. `tile` has the loops.
//!
//! **One stream.** A product of few rows costs as much as reading B, and memory is read at full rate only in order, in
//! one stream. So the panels that a tile of few rows uses together, up to [`MAX_GROUP`], are interleaved row by row.

use rayon::iter::{IntoParallelIterator as _, ParallelIterator as _};

use super::isa::Isa;
use super::tile::{Ahead, Element, Job};
use crate::threads::threads_for;

/// Columns of a panel.
pub(in crate::model) const NR: usize = 32;

/// Maximum panels in a group.
const MAX_GROUP: usize = 4;

/// Prefetch distance of weights in bytes: several latencies of main memory, while prefetched and current weights
/// together fit the L1 cache.
const AHEAD_BYTES: usize = 16 << 10;

/// Rows of an f32 matrix, `rows x width`, `stride` elements apart.
#[derive(Clone, Copy)]
pub(in crate::model) struct Matrix<'a> {
    /// The elements.
    pub data: &'a [f32],
    /// Elements from one row to the next.
    pub stride: usize,
}

/// The sizes of a product: `[m, k] x [k, n]`.
#[derive(Clone, Copy)]
pub(in crate::model) struct Sizes {
    pub m: usize,
    pub k: usize,
    pub n: usize,
}

/// The right operand, `[k, n]`. Packed operands consist of groups of whole panels: of [`group_of`] its columns, or
/// narrower if several separately packed operands are adjacent.
#[derive(Clone, Copy)]
pub(in crate::model) enum Columns<'a> {
    /// Groups of `[k / 2 rounded up, columns]` words; word j of row i is column j, element 2 i in the low half, 2 i + 1
    /// in the high half, which is 0 past the end.
    Bf16 {
        /// The groups.
        words: &'a [u32],
        /// Columns of a group.
        group: usize,
    },
    /// Groups of `[k, columns]`.
    F32 {
        /// The groups.
        values: &'a [f32],
        /// Columns of a group.
        group: usize,
    },
    /// Row-major, `[k, stride]`; the stride is a multiple of [`NR`].
    Rows {
        /// The elements.
        matrix: Matrix<'a>,
        /// The data read next, which is prefetched meanwhile; as long as the part of the matrix that is read.
        next: Option<&'a [f32]>,
    },
}

/// Columns per group of a packed right operand with n columns: whole panels, the same number in every group.
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
/// continues the sums in `c`: consecutive products over parts of k give exactly the sums of one product over all of k.
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

/// Bytes of a group that such a product processes at a time if a tile is narrower than a group: half of the L1 cache,
/// the other half holds prefetched data.
const PIECE_BYTES: usize = 16 << 10;

/// The initial value of a sum.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::model) enum Begin {
    AtZero,
    /// Accumulates on C.
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
    assert!(k > 0 && k <= a.stride && n <= c_stride, "rows may not overlap");
    assert!((m - 1) * a.stride + k <= a.data.len(), "A is too short");
    assert!((m - 1) * c_stride + n <= c.len(), "C is too short");
    let (a, c, ahead) = ((a.data.as_ptr(), a.stride), (c.as_mut_ptr(), c_stride), Ahead::InStream(AHEAD_BYTES));
    // Elements per group of a packed B, after checking that its `len` elements hold all groups.
    let packed_group = |len: usize, rows: usize, group: usize| {
        assert!(group > 0 && group.is_multiple_of(NR), "groups are whole panels");
        assert!(n.div_ceil(group) * rows * group <= len, "B is too short");
        rows * group
    };
    match b {
        Columns::Bf16 { words, group } => {
            let b_group = packed_group(words.len(), k.div_ceil(u32::STEPS), group);
            let job = Job { m, k, n, a, c, begin, ahead, b: words.as_ptr(), b_row: group, b_group, group };
            // SAFETY: all three operands were just checked to have the job's sizes.
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

/// A job shared by threads: they read its operands, and each writes its own columns.
struct Shared<'a, E>(&'a Job<E>);

// SAFETY: everything behind the job's pointers is borrowed while the threads run; A and B are only read, and `launch`
// gives different threads different columns of C.
unsafe impl<E> Sync for Shared<'_, E> {}

/// Processes group after group, and in each a few rows at a time, so that B is read in memory order.
///
/// # Safety
/// `isa` is available, and all operands have the job's sizes.
unsafe fn run_in_pieces<E: Element>(isa: Isa, job: &Job<E>) {
    let step = PIECE_BYTES / (job.b_row * size_of::<E>()) * E::STEPS;
    for column in (0..job.n).step_by(job.group) {
        for k in (0..job.k).step_by(step) {
            // SAFETY: the caller guarantees it; the column is a group's first, and each step covers whole rows.
            unsafe {
                let piece = job.piece(column, k..job.k.min(k + step));
                E::run(isa, &piece, 0..piece.n.div_ceil(NR));
            }
        }
    }
}

/// # Safety
/// `isa` is available, and all operands have the job's sizes.
unsafe fn launch<E: Element>(isa: Isa, job: &Job<E>) {
    let panels = job.n.div_ceil(NR);
    let parts = threads_for(job.m.saturating_mul(job.k).saturating_mul(job.n)).min(panels);
    if parts == 1 {
        let in_pieces = job.m <= FEW_ROWS && isa.has_narrow_tiles() && matches!(job.ahead, Ahead::InStream(_));
        // SAFETY: the caller guarantees it.
        return unsafe { if in_pieces { run_in_pieces(isa, job) } else { E::run(isa, job, 0..panels) } };
    }
    let shared = Shared(job);
    (0..parts).into_par_iter().for_each(|part| {
        // Captures the whole of it, not its pointers individually.
        let shared = &shared;
        // SAFETY: the caller guarantees it; the panels belong to the job and to no other part.
        unsafe { E::run(isa, shared.0, panels * part / parts..panels * (part + 1) / parts) };
    });
}

#[cfg(test)]
#[path = "gemm_tests.rs"]
mod tests;
