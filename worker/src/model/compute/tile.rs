//! The loops of a product: blocks of rows, tiles of rows and panels, and an instruction set's operations on one row of
//! a panel.

use std::ops::Range;

use super::gemm::{Begin, NR};
use super::isa::Isa;
use super::portable::Portable;
#[cfg(target_arch = "x86_64")]
use super::{avx2::Avx2, avx512::Avx512};
#[cfg(not(target_arch = "x86_64"))]
use {Portable as Avx2, Portable as Avx512};

/// Rows whose part of A stays in the caches while the panels of B stream by.
const ROW_BLOCK: usize = 64;

const CACHE_LINE: usize = 64;

/// One product by pointers. Column c of B begins at `b + c / group * b_group + c % group`, and its rows are `b_row`
/// elements apart.
pub(super) struct Job<E> {
    pub(super) m: usize,
    pub(super) k: usize,
    pub(super) n: usize,
    pub(super) a: (*const f32, usize),
    pub(super) b: *const E,
    pub(super) b_row: usize,
    pub(super) b_group: usize,
    /// Columns of a group.
    pub(super) group: usize,
    pub(super) ahead: Ahead,
    pub(super) c: (*mut f32, usize),
    pub(super) begin: Begin,
}

/// Data to prefetch while B is being read, as a wrapping byte offset from that read.
#[derive(Clone, Copy)]
pub(super) enum Ahead {
    /// B itself, and the data after it.
    InStream(usize),
    /// Other data of equal length.
    Elsewhere(usize),
}

impl<E> Job<E> {
    /// Where a column begins, or would begin past the end of B.
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
    /// The part of one group that begins at `column`, over a range of k; prefetches the data after it.
    ///
    /// # Safety
    /// The operands have the job's sizes, and k begins with a row of B.
    pub(super) unsafe fn piece(&self, column: usize, k: Range<usize>) -> Self {
        let bytes = k.len().div_ceil(E::STEPS) * self.b_row * size_of::<E>();
        // SAFETY: the caller guarantees that all three are within the operands.
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

/// An instruction set's operations on one row of a stripe: a whole panel, or a part of it if registers are few.
pub(super) trait Vectors {
    /// Columns of a stripe; divides a panel's.
    const WIDTH: usize;
    /// WIDTH sums, or WIDTH columns of B.
    type Row: Copy;
    /// One element of A in every lane.
    type Splat: Copy;
    /// Rows of the largest tile that fits the registers.
    const MAX_ROWS: usize;
    /// Stripes that tiles of this many rows process together: more for few rows, to hide the latency of additions.
    fn stripes_for(rows: usize) -> usize;

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
    /// The machine has the instruction set; WIDTH elements can be written.
    unsafe fn store(row: Self::Row, to: *mut f32);
}

/// An element type of B that an instruction set can load.
pub(super) trait Load<E>: Vectors {
    /// Values of k in each row of B.
    const STEPS: usize;
    /// One row of a stripe for one of the steps.
    ///
    /// # Safety
    /// The machine has the instruction set; WIDTH elements can be read.
    unsafe fn load(at: *const E, step: usize) -> Self::Row;
}

/// An element type of B that every instruction set can load.
pub(super) trait Element: Copy {
    /// Values of k in each row of B.
    const STEPS: usize;
    /// Computes some panels of a product.
    ///
    /// # Safety
    /// `isa` is available, all operands have the job's sizes, and the panels belong to the job.
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
            // SAFETY: the caller guarantees it.
            unsafe { begin::<Avx512, E>(job, panels) }
        }

        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        unsafe fn on_avx2<E>(job: &Job<E>, panels: Range<usize>)
        where
            Avx2: Load<E>,
        {
            // SAFETY: the caller guarantees it.
            unsafe { begin::<Avx2, E>(job, panels) }
        }

        match isa {
            // SAFETY: the caller guarantees it.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { on_avx512(job, panels) },
            // SAFETY: the caller guarantees it.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { on_avx2(job, panels) },
            // SAFETY: the caller guarantees it.
            Isa::Portable => unsafe { begin::<Portable, E>(job, panels) },
        }
    }
}

/// Instantiates everything below twice, so that sums beginning at zero pay nothing for accumulation.
///
/// # Safety
/// The machine has the instruction set, all operands have the job's sizes, and the panels belong to the job.
#[inline(always)]
unsafe fn begin<V: Load<E> + Load<f32>, E>(job: &Job<E>, panels: Range<usize>) {
    match job.begin {
        // SAFETY: the caller guarantees it.
        Begin::AtZero => unsafe { blocks::<V, E, false>(job, panels) },
        // SAFETY: the caller guarantees it.
        Begin::AtC => unsafe { blocks::<V, E, true>(job, panels) },
    }
}

/// # Safety
/// The machine has the instruction set, all operands have the job's sizes, and the panels belong to the job.
#[inline(always)]
unsafe fn blocks<V: Load<E> + Load<f32>, E, const ON_TOP: bool>(job: &Job<E>, panels: Range<usize>) {
    let mut first = 0;
    while first < job.m {
        // The last block includes what would otherwise be a small remainder.
        let left = job.m - first;
        let rows = if left < 2 * ROW_BLOCK { left } else { ROW_BLOCK };
        // SAFETY: the caller guarantees it; the rows belong to the job.
        unsafe { block::<V, E, ON_TOP>(job, first..first + rows, panels.clone()) };
        first += rows;
    }
}

/// # Safety
/// The machine has the instruction set, all operands have the job's sizes, and rows and panels belong to the job.
#[inline(always)]
unsafe fn block<V: Load<E> + Load<f32>, E, const ON_TOP: bool>(job: &Job<E>, rows: Range<usize>, panels: Range<usize>) {
    // Tiles of equal height: a last tile of one row would be bound by the latency of its additions.
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
            // SAFETY: the caller guarantees it; the stripes belong to the job.
            unsafe { any_tile::<V, E, ON_TOP>(job, row, height, stripe, count, Turn { tile, tiles, opens }) };
            row += height;
        }
        stripe += count;
    }
}

/// # Safety
/// The machine has the instruction set, all operands have the job's sizes, and rows and stripes belong to the job.
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
                // SAFETY: the caller guarantees it.
                $(($height, $stripes) if $height <= V::MAX_ROWS && $stripes <= V::stripes_for($height) => unsafe { tile::<V, E, $height, $stripes, ON_TOP>(job, row, stripe, turn) },)*
                _ => unreachable!("no tile is {height} rows by {stripes} stripes"),
            }
        };
    }
    tiles!(1 x 1, 2 x 1, 3 x 1, 4 x 1, 5 x 1, 6 x 1, 1 x 2, 2 x 2, 3 x 2, 4 x 2, 5 x 2, 6 x 2, 1 x 4, 2 x 4, 3 x 4);
}

/// # Safety
/// The machine has the instruction set, all operands have the job's sizes, and the tile's rows and stripes belong to
/// the job.
#[inline(always)]
unsafe fn tile<V: Load<E> + Load<f32>, E, const M: usize, const P: usize, const ON_TOP: bool>(
    job: &Job<E>,
    row: usize,
    stripe: usize,
    turn: Turn,
) {
    // SAFETY: rows `row..row + M` and stripes `stripe..stripe + P` are the job's, whose operands contain them; of the
    // last stripe only the job's columns are read and written.
    unsafe {
        let a: [*const f32; M] = std::array::from_fn(|r| job.a.0.add((row + r) * job.a.1));
        // Several stripes begin with a panel, whose stripes are adjacent.
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

/// Adds one value of k to all sums of a tile.
///
/// # Safety
/// The machine has the instruction set, and the pointers can be read: element k of each row of A, a row of each stripe.
#[inline(always)]
unsafe fn add_step<V: Load<E>, E, const M: usize, const P: usize>(
    sums: &mut [[V::Row; P]; M],
    a: [*const f32; M],
    k: usize,
    b: [*const E; P],
    step: usize,
) {
    // SAFETY: the caller guarantees it.
    unsafe {
        let a = a.map(|a| a.add(k));
        // The operand with fewer rows is kept in registers, the other streams by.
        if M <= P {
            // Not by `map`: in development builds, intrinsics inside a closure are not inlined.
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

/// A tile's position among those that process the same stripes in sequence.
#[derive(Clone, Copy)]
struct Turn {
    tile: usize,
    tiles: usize,
    /// Whether no earlier stripes could have prefetched these.
    opens: bool,
}

/// A tile's prefetches while it computes: the next stripes, a few rows by each of the tiles. If the first tile
/// requested everything, memory would be idle while the others compute.
struct Prefetch {
    at: *const i8,
    /// Bytes between two prefetches.
    step: usize,
    /// Rows of the tile per prefetched row, and how many of them are left.
    every: usize,
    left: usize,
}

impl Prefetch {
    #[inline(always)]
    fn new<E>(job: &Job<E>, turn: Turn, column: usize, columns: usize, rows: usize) -> Self {
        let Turn { tile, tiles, opens } = turn;
        let (next, step, tile, tiles) = match job.ahead {
            // In memory order, regardless of the order of computation, because that is faster.
            Ahead::Elsewhere(bytes) => {
                (job.b.wrapping_add(column * rows).wrapping_byte_add(bytes), columns, tile, tiles)
            }
            // The first tile prefetches its own stripes, then the others prefetch the following ones.
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

    /// Called for each row of the tile, which has P stripes.
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

/// Loads WIDTH sums from `column` on, of a row of C with n columns.
///
/// # Safety
/// The machine has the instruction set, and the row can be read.
#[inline(always)]
unsafe fn load_sums<V: Load<f32>>(row: *const f32, column: usize, n: usize) -> V::Row {
    // SAFETY: the caller guarantees it; no column past the row's end is read.
    unsafe {
        if column + V::WIDTH <= n {
            return V::load(row.add(column), 0);
        }
        let mut whole = [0.0f32; NR];
        std::ptr::copy_nonoverlapping(row.add(column), whole.as_mut_ptr(), n - column);
        V::load(whole.as_ptr(), 0)
    }
}

/// Stores WIDTH sums from `column` on, to a row of C with n columns.
///
/// # Safety
/// The machine has the instruction set, and the row can be written.
#[inline(always)]
unsafe fn store_sums<V: Vectors>(sums: V::Row, row: *mut f32, column: usize, n: usize) {
    // SAFETY: the caller guarantees it; no column past the row's end is written.
    unsafe {
        if column + V::WIDTH <= n {
            return V::store(sums, row.add(column));
        }
        let mut whole = [0.0f32; NR];
        V::store(sums, whole.as_mut_ptr());
        std::ptr::copy_nonoverlapping(whole.as_ptr(), row.add(column), n - column);
    }
}
