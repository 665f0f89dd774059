//! `C = A x B` where B lies in panels of [`NR`] columns.
//!
//! A tile of up to 8 rows and one panel (or up to 4 panels, when there are few rows) is accumulated in registers over all of
//! k, one fused multiply-add per element and step: the order of each sum is k ascending, whatever the shape of the tile.

use super::isa::Isa;
use super::portable;
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};

/// Columns of a panel.
pub(in crate::model) const NR: usize = 32;

/// Rows whose part of A stays in the caches while the panels of B pass by.
const ROW_BLOCK: usize = 64;

/// Rows of an f32 matrix, `rows x width`, each `stride` elements after the one before.
#[derive(Clone, Copy)]
pub(in crate::model) struct Matrix<'a> {
    /// The elements.
    pub data: &'a [f32],
    /// Elements from one row to the next.
    pub stride: usize,
}

/// The right operand, `[k, n]`.
#[derive(Clone, Copy)]
pub(in crate::model) enum Columns<'a> {
    /// Panels of `[k, 16]` words; column j of a panel is the low half of word j, column 16 + j its high half.
    Bf16(&'a [u32]),
    /// Panels of `[k, NR]`.
    F32(&'a [f32]),
    /// Row-major, `[k, stride]`; the stride is a multiple of [`NR`].
    Rows(Matrix<'a>),
}

/// Writes `a [m, k] x b [k, n]` to `c [m, n]`, whose rows are `c_stride` elements apart.
///
/// # Panics
/// If a slice is too short for these sizes.
pub(in crate::model) fn multiply(
    (m, k, n): (usize, usize, usize),
    a: Matrix<'_>,
    b: Columns<'_>,
    c: &mut [f32],
    c_stride: usize,
) {
    multiply_on(Isa::best(), (m, k, n), a, b, c, c_stride);
}

fn multiply_on(
    isa: Isa,
    (m, k, n): (usize, usize, usize),
    a: Matrix<'_>,
    b: Columns<'_>,
    c: &mut [f32],
    c_stride: usize,
) {
    if m == 0 || n == 0 {
        return;
    }
    assert!(k > 0 && k <= a.stride && n <= c_stride, "rows may not overlap");
    assert!((m - 1) * a.stride + k <= a.data.len(), "A is too short");
    assert!((m - 1) * c_stride + n <= c.len(), "C is too short");
    let panels = n.div_ceil(NR);
    let a = (a.data.as_ptr(), a.stride);
    let c = (c.as_mut_ptr(), c_stride);
    match b {
        Columns::Bf16(words) => {
            assert!(panels * k * (NR / 2) <= words.len(), "B is too short");
            let job = Job { m, k, n, a, b: words.as_ptr(), b_row: NR / 2, b_panel: k * (NR / 2), c };
            // SAFETY: all three operands were just checked to be as long as the job says.
            unsafe { run(isa, &job) }
        }
        Columns::F32(values) => {
            assert!(panels * k * NR <= values.len(), "B is too short");
            let job = Job { m, k, n, a, b: values.as_ptr(), b_row: NR, b_panel: k * NR, c };
            // SAFETY: as above.
            unsafe { run(isa, &job) }
        }
        Columns::Rows(Matrix { data, stride }) => {
            assert!(panels * NR <= stride && k * stride <= data.len(), "B is too short");
            let job = Job { m, k, n, a, b: data.as_ptr(), b_row: stride, b_panel: NR, c };
            // SAFETY: as above.
            unsafe { run(isa, &job) }
        }
    }
}

/// One product by pointers: `b` is B's first panel, whose rows are `b_row` elements apart, and whose panels `b_panel`.
pub(super) struct Job<E> {
    m: usize,
    k: usize,
    n: usize,
    a: (*const f32, usize),
    b: *const E,
    b_row: usize,
    b_panel: usize,
    c: (*mut f32, usize),
}

/// What an instruction set does with one row of a panel, NR columns.
pub(super) trait Vectors {
    /// NR sums, or NR columns of B.
    type Row: Copy;
    /// One element of A in every lane.
    type Splat: Copy;
    /// Rows of the largest tile of one panel that fits the registers.
    const MAX_ROWS: usize;
    /// Panels that are worked on together when there are so few rows.
    fn panels_for(rows: usize) -> usize;

    /// # Safety
    /// The machine has the instruction set.
    unsafe fn zero() -> Self::Row;
    /// # Safety
    /// The machine has the instruction set; `at` can be read.
    unsafe fn splat(at: *const f32) -> Self::Splat;
    /// # Safety
    /// The machine has the instruction set.
    unsafe fn add_product(sum: &mut Self::Row, a: Self::Splat, b: Self::Row);
    /// # Safety
    /// The machine has the instruction set; NR elements can be written.
    unsafe fn store(row: Self::Row, to: *mut f32);
}

/// An element type of B that an instruction set can load.
pub(super) trait Load<E>: Vectors {
    /// # Safety
    /// The machine has the instruction set; one row of a panel can be read.
    unsafe fn load(at: *const E) -> Self::Row;
}

/// # Safety
/// `isa` is available and all operands are as long as the job says.
unsafe fn run<E>(isa: Isa, job: &Job<E>)
where
    portable::Portable: Load<E>,
    Avx2: Load<E>,
    Avx512: Load<E>,
{
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    unsafe fn on_avx512<E>(job: &Job<E>)
    where
        Avx512: Load<E>,
    {
        // SAFETY: by the caller.
        unsafe { blocks::<Avx512, E>(job) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn on_avx2<E>(job: &Job<E>)
    where
        Avx2: Load<E>,
    {
        // SAFETY: by the caller.
        unsafe { blocks::<Avx2, E>(job) }
    }

    match isa {
        // SAFETY: by the caller.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { on_avx512(job) },
        // SAFETY: by the caller.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { on_avx2(job) },
        // SAFETY: by the caller.
        Isa::Portable => unsafe { blocks::<portable::Portable, E>(job) },
    }
}

#[cfg(target_arch = "x86_64")]
use {avx2::Avx2, avx512::Avx512};
#[cfg(not(target_arch = "x86_64"))]
use {portable::Portable as Avx2, portable::Portable as Avx512};

/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn blocks<V: Load<E>, E>(job: &Job<E>) {
    let mut first = 0;
    while first < job.m {
        // The last block takes what would otherwise be a small rest.
        let left = job.m - first;
        let rows = if left < 2 * ROW_BLOCK { left } else { ROW_BLOCK };
        // SAFETY: by the caller; the rows are some of the job's.
        unsafe { block::<V, E>(job, first, rows) };
        first += rows;
    }
}

/// # Safety
/// As [`run`], and the rows are some of the job's.
#[inline(always)]
unsafe fn block<V: Load<E>, E>(job: &Job<E>, first: usize, rows: usize) {
    // Tiles of equal height: a last tile of one row would wait for its own sums.
    let tiles = rows.div_ceil(V::MAX_ROWS);
    let (height, higher) = (rows / tiles, rows % tiles);
    let panels = job.n.div_ceil(NR);
    let together = if tiles == 1 { V::panels_for(rows) } else { 1 };
    let mut panel = 0;
    while panel < panels {
        let left = panels - panel;
        let count = if left >= together {
            together
        } else if left >= 2 && together > 2 {
            2
        } else {
            1
        };
        let mut row = first;
        for tile in 0..tiles {
            let height = height + usize::from(tile < higher);
            // SAFETY: by the caller; the panels are some of the job's.
            unsafe { any_tile::<V, E>(job, row, height, panel, count) };
            row += height;
        }
        panel += count;
    }
}

/// # Safety
/// As [`block`], and the panels are some of the job's.
#[inline(always)]
unsafe fn any_tile<V: Load<E>, E>(job: &Job<E>, row: usize, height: usize, panel: usize, panels: usize) {
    macro_rules! tiles {
        ($($height:literal x $panels:literal),*) => {
            match (height, panels) {
                // SAFETY: by the caller.
                $(($height, $panels) if $height <= V::MAX_ROWS => unsafe { tile::<V, E, $height, $panels>(job, row, panel) },)*
                _ => unreachable!("no tile is {height} rows by {panels} panels"),
            }
        };
    }
    tiles!(1 x 1, 2 x 1, 3 x 1, 4 x 1, 5 x 1, 6 x 1, 7 x 1, 8 x 1, 1 x 2, 2 x 2, 3 x 2, 4 x 2, 1 x 4, 2 x 4);
}

/// # Safety
/// As [`block`], for the tile's rows and panels.
#[inline(always)]
unsafe fn tile<V: Load<E>, E, const M: usize, const P: usize>(job: &Job<E>, row: usize, panel: usize) {
    // SAFETY: rows `row..row + M` and panels `panel..panel + P` are the job's, whose operands hold them whole; of the last
    // panel only the job's columns are written.
    unsafe {
        let a: [*const f32; M] = std::array::from_fn(|r| job.a.0.add((row + r) * job.a.1));
        let b: [*const E; P] = std::array::from_fn(|p| job.b.add((panel + p) * job.b_panel));
        let mut sums = [[V::zero(); P]; M];
        for k in 0..job.k {
            let mut columns = [V::zero(); P];
            for p in 0..P {
                columns[p] = V::load(b[p].add(k * job.b_row));
            }
            for r in 0..M {
                let element = V::splat(a[r].add(k));
                for p in 0..P {
                    V::add_product(&mut sums[r][p], element, columns[p]);
                }
            }
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (p, sum) in sums.into_iter().enumerate() {
                let column = (panel + p) * NR;
                let to = job.c.0.add((row + r) * job.c.1 + column);
                if column + NR <= job.n {
                    V::store(sum, to);
                } else {
                    let mut whole = [0.0f32; NR];
                    V::store(sum, whole.as_mut_ptr());
                    std::ptr::copy_nonoverlapping(whole.as_ptr(), to, job.n - column);
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "gemm_tests.rs"]
mod tests;
