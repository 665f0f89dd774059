//! The loops of a matrix product over blocks of rows and over tiles of rows and panels, and an instruction set's
//! operations on one panel row.

use std::ops::Range;

use super::gemm::{Begin, NR};
use super::isa::Isa;
use super::portable::Portable;
#[cfg(target_arch = "x86_64")]
use super::{avx2::Avx2, avx512::Avx512};
#[cfg(not(target_arch = "x86_64"))]
use {Portable as Avx2, Portable as Avx512};

/// Rows per block. A block's part of A stays in the caches while the panels of B are streamed.
const ROW_BLOCK: usize = 64;

const CACHE_LINE: usize = 64;

/// One matrix product, described by raw pointers. Column c of B begins at `b + c / group * b_group + c % group`, and
/// the rows of B are `b_row` elements apart.
pub(super) struct Job<E> {
    pub(super) m: usize,
    pub(super) k: usize,
    pub(super) n: usize,
    pub(super) a: (*const f32, usize),
    pub(super) b: *const E,
    pub(super) b_row: usize,
    pub(super) b_group: usize,
    /// Columns per group.
    pub(super) group: usize,
    pub(super) ahead: Ahead,
    pub(super) c: (*mut f32, usize),
    pub(super) begin: Begin,
}

/// Data to prefetch while B is being read, as a wrapping byte offset from the current read.
#[derive(Clone, Copy)]
pub(super) enum Ahead {
    /// B itself and the data that follows it.
    InStream(usize),
    /// Other data of the same length as B.
    Elsewhere(usize),
}

impl<E> Job<E> {
    /// Returns the address of a column, which may be past the end of B.
    #[inline(always)]
    fn at(&self, column: usize) -> *const E {
        self.b.wrapping_add(column / self.group * self.b_group + column % self.group)
    }

    /// A row of C.
    #[inline(always)]
    fn sums(&self, row: usize) -> *mut f32 {
        self.c.0.wrapping_add(row * self.c.1)
    }
}

impl<E: Element> Job<E> {
    /// Returns the part of this job that covers the group starting at `column` over a range of k, and prefetches the
    /// data that follows it.
    ///
    /// # Safety
    /// The operands must have the job's sizes, and the range of k must start at a row of B.
    pub(super) unsafe fn piece(&self, column: usize, k: Range<usize>) -> Self {
        let bytes = k.len().div_ceil(E::STEPS) * self.b_row * size_of::<E>();
        // SAFETY: the caller guarantees that all three pointers are within the operands.
        let (a, b, c) = unsafe {
            (self.a.0.add(k.start), self.at(column).add(k.start / E::STEPS * self.b_row), self.c.0.add(column))
        };
        Self {
            k: k.len(),
            n: self.group.min(self.n - column),
            a: (a, self.a.1),
            b,
            ahead: Ahead::Elsewhere(bytes),
            c: (c, self.c.1),
            begin: if k.start == 0 { self.begin } else { Begin::AtC },
            ..*self
        }
    }
}

/// An instruction set's operations on one row of a stripe. A stripe is a whole panel, or part of a panel if there are
/// few registers.
pub(super) trait Vectors {
    /// Columns per stripe; divides [`NR`].
    const WIDTH: usize;
    /// WIDTH sums, or WIDTH elements in a row of B.
    type Row: Copy;
    /// One element of A, broadcast to every lane.
    type Splat: Copy;
    /// Rows in the largest tile that fits in registers.
    const MAX_ROWS: usize;
    /// Number of stripes that a tile with this many rows processes together. Tiles with few rows process more stripes,
    /// to hide the latency of additions.
    fn stripes_for(rows: usize) -> usize;

    /// # Safety
    /// The CPU must support the instruction set.
    unsafe fn zero() -> Self::Row;
    /// # Safety
    /// The CPU must support the instruction set, and `at` must be readable.
    unsafe fn splat(at: *const f32) -> Self::Splat;
    /// # Safety
    /// The CPU must support the instruction set.
    unsafe fn add_product(sum: &mut Self::Row, a: Self::Splat, b: Self::Row);
    /// # Safety
    /// The CPU must support the instruction set, and WIDTH elements must be writable.
    unsafe fn store(row: Self::Row, to: *mut f32);
}

/// An element type of B that an instruction set can load.
pub(super) trait Load<E>: Vectors {
    /// Number of k values in each row of B.
    const STEPS: usize;
    /// Loads one stripe row for one of the k values that share a row of B.
    ///
    /// # Safety
    /// The CPU must support the instruction set, and WIDTH elements must be readable.
    unsafe fn load(at: *const E, step: usize) -> Self::Row;
}

/// An element type of B that every instruction set can load.
pub(super) trait Element: Copy {
    /// Number of k values in each row of B.
    const STEPS: usize;
    /// Computes a range of a product's panels.
    ///
    /// # Safety
    /// `isa` must be available, all operands must have the job's sizes, and the panels must belong to the job.
    unsafe fn run(isa: Isa, job: &Job<Self>, panels: Range<usize>);
}

impl<E: Copy> Element for E
where
    Portable: Load<E>,
    Avx2: Load<E>,
    Avx512: Load<E>,
{
    const STEPS: usize = <Portable as Load<E>>::STEPS;

    unsafe fn run(isa: Isa, job: &Job<E>, panels: Range<usize>) {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
        unsafe fn on_avx512<E>(job: &Job<E>, panels: Range<usize>)
        where
            Avx512: Load<E>,
        {
            // SAFETY: the caller upholds the safety contract.
            unsafe { begin::<Avx512, E>(job, panels) }
        }

        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        unsafe fn on_avx2<E>(job: &Job<E>, panels: Range<usize>)
        where
            Avx2: Load<E>,
        {
            // SAFETY: the caller upholds the safety contract.
            unsafe { begin::<Avx2, E>(job, panels) }
        }

        match isa {
            // SAFETY: the caller upholds the safety contract.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { on_avx512(job, panels) },
            // SAFETY: the caller upholds the safety contract.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { on_avx2(job, panels) },
            // SAFETY: the caller upholds the safety contract.
            Isa::Portable => unsafe { begin::<Portable, E>(job, panels) },
        }
    }
}

/// Instantiates the loops once per kind of initial sum, so that sums that start at zero do not pay for loading C.
///
/// # Safety
/// The CPU must support the instruction set, all operands must have the job's sizes, and the panels must belong to the
/// job.
#[inline(always)]
unsafe fn begin<V: Load<E> + Load<f32>, E>(job: &Job<E>, panels: Range<usize>) {
    match job.begin {
        // SAFETY: the caller upholds the safety contract.
        Begin::AtZero => unsafe { blocks::<V, E, false>(job, panels) },
        // SAFETY: the caller upholds the safety contract.
        Begin::AtC => unsafe { blocks::<V, E, true>(job, panels) },
    }
}

/// # Safety
/// The CPU must support the instruction set, all operands must have the job's sizes, and the panels must belong to the
/// job.
#[inline(always)]
unsafe fn blocks<V: Load<E> + Load<f32>, E, const ON_TOP: bool>(job: &Job<E>, panels: Range<usize>) {
    let mut first = 0;
    while first < job.m {
        // The last block absorbs the remainder, which would otherwise be a small block of its own.
        let left = job.m - first;
        let rows = if left < 2 * ROW_BLOCK { left } else { ROW_BLOCK };
        // SAFETY: the caller upholds the safety contract, and the rows belong to the job.
        unsafe { block::<V, E, ON_TOP>(job, first..first + rows, panels.clone()) };
        first += rows;
    }
}

/// # Safety
/// The CPU must support the instruction set, all operands must have the job's sizes, and rows and panels must belong to
/// the job.
#[inline(always)]
unsafe fn block<V: Load<E> + Load<f32>, E, const ON_TOP: bool>(job: &Job<E>, rows: Range<usize>, panels: Range<usize>) {
    // Tile heights differ by at most one row, because a last tile with a single row would be bound by the latency of
    // additions.
    let tiles = rows.len().div_ceil(V::MAX_ROWS);
    let (height, higher) = (rows.len() / tiles, rows.len() % tiles);
    let together = V::stripes_for(height + usize::from(higher > 0));
    let first = panels.start * NR / V::WIDTH;
    let end = (panels.end * NR).min(job.n).div_ceil(V::WIDTH);
    let mut stripe = first;
    while stripe < end {
        let left = end - stripe;
        let count = if left >= together {
            together
        } else if left >= 2 && together > 2 {
            2
        } else {
            1
        };
        let opens = stripe == first;
        let mut row = rows.start;
        for tile in 0..tiles {
            let height = height + usize::from(tile < higher);
            // SAFETY: the caller upholds the safety contract, and the stripes belong to the job.
            unsafe { any_tile::<V, E, ON_TOP>(job, row, height, stripe, count, Turn { tile, tiles, opens }) };
            row += height;
        }
        stripe += count;
    }
}

/// # Safety
/// The CPU must support the instruction set, all operands must have the job's sizes, and rows and stripes must belong
/// to the job.
#[inline(always)]
unsafe fn any_tile<V: Load<E> + Load<f32>, E, const ON_TOP: bool>(
    job: &Job<E>,
    row: usize,
    height: usize,
    stripe: usize,
    stripes: usize,
    turn: Turn,
) {
    macro_rules! tiles {
        ($($height:literal x $stripes:literal),*) => {
            match (height, stripes) {
                // SAFETY: the caller upholds the safety contract.
                $(($height, $stripes) if $height <= V::MAX_ROWS && $stripes <= V::stripes_for($height) => unsafe { tile::<V, E, $height, $stripes, ON_TOP>(job, row, stripe, turn) },)*
                _ => unreachable!("no tile has {height} rows and {stripes} stripes"),
            }
        };
    }
    tiles!(1 x 1, 2 x 1, 3 x 1, 4 x 1, 5 x 1, 6 x 1, 1 x 2, 2 x 2, 3 x 2, 4 x 2, 5 x 2, 6 x 2, 1 x 4, 2 x 4, 3 x 4);
}

/// # Safety
/// The CPU must support the instruction set, all operands must have the job's sizes, and the tile's rows and stripes
/// must belong to the job.
#[inline(always)]
unsafe fn tile<V: Load<E> + Load<f32>, E, const M: usize, const P: usize, const ON_TOP: bool>(
    job: &Job<E>,
    row: usize,
    stripe: usize,
    turn: Turn,
) {
    // SAFETY: rows `row..row + M` and stripes `stripe..stripe + P` belong to the job, whose operands contain them. In
    // the last stripe, only the job's columns are read and written.
    unsafe {
        let a: [*const f32; M] = std::array::from_fn(|r| job.a.0.add((row + r) * job.a.1));
        // With P > 1, the first stripe is the first one of a panel, and a panel's stripes are adjacent in memory.
        let b: [*const E; P] = std::array::from_fn(|p| {
            let in_panel = p * V::WIDTH % NR;
            job.at((stripe + p) * V::WIDTH - in_panel).add(in_panel)
        });
        let mut sums = [[V::zero(); P]; M];
        if ON_TOP {
            for (r, sums) in sums.iter_mut().enumerate() {
                for (p, sum) in sums.iter_mut().enumerate() {
                    *sum = load_sums::<V>(job.sums(row + r), (stripe + p) * V::WIDTH, job.n);
                }
            }
        }
        let steps = <V as Load<E>>::STEPS;
        let whole = job.k / steps;
        let mut prefetch = Prefetch::new(job, turn, stripe * V::WIDTH, P * V::WIDTH, whole);
        for at in 0..whole {
            let b = b.map(|b| b.add(at * job.b_row));
            prefetch.row::<V, E, P>();
            for step in 0..steps {
                add_step::<V, E, M, P>(&mut sums, a, at * steps + step, b, step);
            }
        }
        for step in 0..job.k % steps {
            add_step::<V, E, M, P>(&mut sums, a, whole * steps + step, b.map(|b| b.add(whole * job.b_row)), step);
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (p, sum) in sums.into_iter().enumerate() {
                store_sums::<V>(sum, job.sums(row + r), (stripe + p) * V::WIDTH, job.n);
            }
        }
    }
}

/// Accumulates the products for one value of k in all sums of a tile.
///
/// # Safety
/// The CPU must support the instruction set. Element k of each row of A and one row of each stripe must be readable.
#[inline(always)]
unsafe fn add_step<V: Load<E>, E, const M: usize, const P: usize>(
    sums: &mut [[V::Row; P]; M],
    a: [*const f32; M],
    k: usize,
    b: [*const E; P],
    step: usize,
) {
    // SAFETY: the caller upholds the safety contract.
    unsafe {
        let a = a.map(|a| a.add(k));
        // The operand with fewer vectors stays in registers while the other one is streamed.
        if M <= P {
            // A loop is used instead of `map` because development builds do not inline intrinsics inside closures.
            let mut elements = [V::splat(a[0]); M];
            for (element, a) in elements.iter_mut().zip(&a) {
                *element = V::splat(*a);
            }
            for p in 0..P {
                let columns = V::load(b[p], step);
                for r in 0..M {
                    V::add_product(&mut sums[r][p], elements[r], columns);
                }
            }
        } else {
            let mut columns = [V::load(b[0], step); P];
            for (columns, b) in columns.iter_mut().zip(&b) {
                *columns = V::load(*b, step);
            }
            for r in 0..M {
                let element = V::splat(a[r]);
                for p in 0..P {
                    V::add_product(&mut sums[r][p], element, columns[p]);
                }
            }
        }
    }
}

/// A tile's position among the tiles that process the same stripes one after another.
#[derive(Clone, Copy)]
struct Turn {
    tile: usize,
    tiles: usize,
    /// Whether these are the first stripes, which no earlier tile can have prefetched.
    opens: bool,
}

/// Prefetches the next stripes while a tile computes. Each tile prefetches only some of the rows: if the first tile
/// requested all of them, memory would be idle while the other tiles compute.
struct Prefetch {
    at: *const i8,
    /// Bytes between two prefetches.
    step: usize,
    /// Number of rows computed per prefetched row; `left` counts down to the next prefetch.
    every: usize,
    left: usize,
}

impl Prefetch {
    #[inline(always)]
    fn new<E>(job: &Job<E>, turn: Turn, column: usize, columns: usize, rows: usize) -> Self {
        let Turn { tile, tiles, opens } = turn;
        let (next, step, tile, tiles) = match job.ahead {
            // Prefetching in memory order is faster, regardless of the order of computation.
            Ahead::Elsewhere(bytes) => {
                (job.b.wrapping_add(column * rows).wrapping_byte_add(bytes), columns, tile, tiles)
            }
            // The first tile prefetches its own stripes; the other tiles then prefetch the stripes that follow.
            Ahead::InStream(bytes) if tile == 0 && (opens || tiles == 1) => {
                (job.at(column).wrapping_byte_add(bytes), job.b_row, 0, 1)
            }
            Ahead::InStream(_) => {
                let opened = usize::from(opens);
                (job.at(column + columns), job.b_row, tile - opened, tiles - opened)
            }
        };
        let step = step * size_of::<E>();
        let at = next.cast::<i8>().wrapping_add(rows * tile / tiles * step);
        Self { at, step, every: tiles, left: 1 }
    }

    /// Must be called for each row of B that a tile with P stripes reads; prefetches when a row is due.
    #[inline(always)]
    fn row<V: Vectors, E, const P: usize>(&mut self) {
        self.left -= 1;
        if self.left > 0 {
            return;
        }
        self.left = self.every;
        #[cfg(target_arch = "x86_64")]
        for line in 0..P * V::WIDTH * size_of::<E>() / CACHE_LINE {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a prefetch reads nothing and never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.at.wrapping_add(line * CACHE_LINE)) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = CACHE_LINE;
        self.at = self.at.wrapping_add(self.step);
    }
}

/// Loads WIDTH sums, starting at `column`, from a row of C with n columns.
///
/// # Safety
/// The CPU must support the instruction set, and the row must be readable.
#[inline(always)]
unsafe fn load_sums<V: Load<f32>>(row: *const f32, column: usize, n: usize) -> V::Row {
    // SAFETY: the caller upholds the safety contract, and no column past the end of the row is read.
    unsafe {
        if column + V::WIDTH <= n {
            return V::load(row.add(column), 0);
        }
        let mut whole = [0.0f32; NR];
        std::ptr::copy_nonoverlapping(row.add(column), whole.as_mut_ptr(), n - column);
        V::load(whole.as_ptr(), 0)
    }
}

/// Stores WIDTH sums, starting at `column`, to a row of C with n columns.
///
/// # Safety
/// The CPU must support the instruction set, and the row must be writable.
#[inline(always)]
unsafe fn store_sums<V: Vectors>(sums: V::Row, row: *mut f32, column: usize, n: usize) {
    // SAFETY: the caller upholds the safety contract, and no column past the end of the row is written.
    unsafe {
        if column + V::WIDTH <= n {
            return V::store(sums, row.add(column));
        }
        let mut whole = [0.0f32; NR];
        V::store(sums, whole.as_mut_ptr());
        std::ptr::copy_nonoverlapping(whole.as_ptr(), row.add(column), n - column);
    }
}
