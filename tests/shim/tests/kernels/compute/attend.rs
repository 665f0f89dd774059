//! Attention over pages against a softmax in f64; a row's bits must not depend on the shape of the call.

use half::bf16;
use semmoe_kernels::{Dtype, Element};
use semmoe_kernels_cuda::compute::{Attend, PAGE_TOKENS, PagedHeads};
use semmoe_kernels_cuda::{Buffer, LaunchError};
use semmoe_kernels_shim::{HostBuffer, Shim};
use semmoe_reference::attention::{Case, LAYER, LAYERS, Paged};
use semmoe_reference::data::same;

use super::{close, run};
use crate::support::{holding, read, shim};

/// Several passes of a block over a row's queries and over columns of values.
pub(super) fn case_of_barriers(dim: usize) -> Case {
    Case::new(1, 40, dim, &[(130, 1)])
}

/// A case in device memory.
struct World<T> {
    of: Paged<T>,
    pool: HostBuffer,
}

impl<T: Element> World<T> {
    fn new(case: &Case, seed: u64) -> Self {
        let of = Paged::new(case, seed);
        let pool = holding(&of.pool);
        Self { of, pool }
    }

    fn case(&self) -> &Case {
        &self.of.case
    }

    /// A call on some rows; more sequences than keys put a block's rows apart.
    fn call(&self, rows: std::ops::Range<usize>, memory: &Memory, apart: bool) -> Attend {
        let Case { kv_heads, group, dim, .. } = *self.case();
        let from = |buffer: Buffer, bytes: usize| buffer.from_offset((rows.start * bytes) as u64);
        let most = self.of.positions[rows.clone()].iter().max().copied().unwrap_or_default();
        Attend {
            heads: PagedHeads {
                pool: self.pool.buffer(),
                pages: self.of.pages() as u64,
                layer: LAYER as u64,
                layers: LAYERS as u64,
                kv_heads: kv_heads as u64,
                group: group as u64,
                dim: dim as u64,
                dtype: T::DTYPE,
            },
            scale: self.case().scale(),
            queries: from(memory.queries.buffer(), self.case().width() * size_of::<T>()),
            positions: from(memory.positions.buffer(), 4),
            sequence_of: from(memory.sequence_of.buffer(), 4),
            page_table: memory.table.buffer(),
            sequences: if apart { memory.most_sequences } else { self.case().sequences.len() as u64 },
            table_width: self.of.table_width as u64,
            longest: most.into(),
            scratch: memory.scratch.buffer(),
            out: from(memory.out.buffer(), self.case().width() * size_of::<T>()),
            rows: rows.len() as u64,
        }
    }

    fn memory(&self) -> Memory {
        let rows = self.case().rows();
        let heads = self.call(0..0, &Memory::default(), false).heads;
        // Pads the table with empty sequences to the number of rows.
        let mut table = self.of.table.clone();
        let most_sequences = self.case().sequences.len().max(rows);
        table.resize(most_sequences * self.of.table_width, u32::MAX);
        let longest = *self.of.positions.iter().max().unwrap();
        Memory {
            queries: holding(&self.of.queries),
            positions: holding(&self.of.positions),
            sequence_of: holding(&self.of.sequence_of),
            table: holding(&table),
            most_sequences: most_sequences as u64,
            scratch: HostBuffer::poisoned(heads.scratch_bytes(rows as u64, longest.into()) as usize),
            out: HostBuffer::poisoned(rows * self.case().width() * size_of::<T>()),
        }
    }

    /// All rows, in calls of `rows_of_call`.
    fn run(&self, shim: &Shim, rows_of_call: usize, apart: bool, seed: u64) -> Result<Vec<T>, String> {
        let memory = self.memory();
        for first in (0..self.case().rows()).step_by(rows_of_call) {
            let rows = first..self.case().rows().min(first + rows_of_call);
            run(shim, &self.call(rows, &memory, apart).launch().unwrap(), seed)?;
        }
        Ok(read(&memory.out))
    }
}

struct Memory {
    queries: HostBuffer,
    positions: HostBuffer,
    sequence_of: HostBuffer,
    table: HostBuffer,
    most_sequences: u64,
    scratch: HostBuffer,
    out: HostBuffer,
}

impl Default for Memory {
    fn default() -> Self {
        let none = || HostBuffer::zeroed(0);
        let [queries, positions, sequence_of, table, scratch, out] = [(); 6].map(|()| none());
        Self { queries, positions, sequence_of, table, most_sequences: 0, scratch, out }
    }
}

/// All rows in one call; returns them.
fn at_once<T: Element>(shim: &Shim, world: &World<T>, seed: u64) -> Result<Vec<T>, String> {
    let rows = world.case().rows();
    let found = world.run(shim, rows, false, seed)?;
    let expected: Vec<f64> = (0..rows).flat_map(|row| world.of.row(row)).collect();
    close("attention", &found, &expected)?;
    // Most equal the nearest value of their type: neither scores nor weights were rounded to it in between.
    let off = found.iter().zip(&expected).filter(|(found, expected)| **found != T::round(**expected as f32)).count();
    if T::DTYPE == Dtype::Bf16 && off > found.len() / 50 + 1 {
        return Err(format!("{off} of {} values are not the nearest", found.len()));
    }
    Ok(found)
}

pub(super) fn attend<T: Element>(shim: &Shim, case: &Case, seed: u64) -> Result<(), String> {
    at_once(shim, &World::<T>::new(case, seed), seed).map(drop)
}

/// One call, calls of a few rows, and blocks of one row must give equal bits.
fn all_ways<T: Element>(shim: &Shim, case: &Case, rows_of_call: usize, seed: u64) -> Result<(), String> {
    let world = World::<T>::new(case, seed);
    let at_once = at_once(shim, &world, seed)?;
    same("rows in several calls", &world.run(shim, rows_of_call, false, seed + 1)?, &at_once)?;
    same("rows apart", &world.run(shim, case.rows(), true, seed + 2)?, &at_once)
}

#[test]
fn rows_attend_to_their_sequence_the_same_in_every_call() {
    let Some(shim) = shim() else { return };
    // Prompts and decodes; one key, a page's end, several splits.
    let mixed = [(1, 1), (64, 3), (65, 1), (270, 6), (130, 1)];
    let cases = [
        Case::new(1, 1, 8, &mixed),
        Case::new(2, 2, 20, &[(67, 7), (3, 3)]),
        Case::new(1, 8, 64, &[(258, 5), (66, 1)]),
        Case::new(2, 4, 128, &[(65, 3)]),
        Case::new(1, 12, 72, &[(70, 2), (40, 6)]),
        // More queries in a row than a block takes at once.
        Case::new(1, 40, 8, &[(66, 3)]),
    ];
    for (seed, case) in cases.iter().enumerate() {
        all_ways::<bf16>(shim, case, 2, seed as u64).unwrap_or_else(|error| panic!("bf16, {case:?}: {error}"));
        all_ways::<f32>(shim, case, 2, seed as u64).unwrap_or_else(|error| panic!("f32, {case:?}: {error}"));
    }
}

#[test]
fn splits_of_one_block_and_of_several_give_the_same() {
    let Some(shim) = shim() else { return };
    // All rows: one block reduces the splits; a hundred at a time: each split has its own.
    let case = Case::new(1, 1, 8, &[(127, 127), (600, 3)]);
    all_ways::<bf16>(shim, &case, 100, 1).unwrap();
    all_ways::<f32>(shim, &case, 100, 1).unwrap();
}

#[test]
fn what_the_tables_do_not_have_gives_nan() {
    let Some(shim) = shim() else { return };
    let case = Case::new(1, 2, 8, &[(70, 1), (5, 1), (10, 1), (90, 1)]);
    for tensor in [true, false] {
        let found = if tensor { lost::<bf16>(shim, &case) } else { lost::<f32>(shim, &case) };
        let expected = [true, true, false, true];
        assert_eq!(found.unwrap(), expected, "tensor products: {tensor}");
    }
}

/// Which rows are NaN if the first sequence's second page and the second sequence are missing, and the last sees more
/// keys than allowed.
fn lost<T: Element>(shim: &Shim, case: &Case) -> Result<Vec<bool>, String> {
    let mut world = World::<T>::new(case, 3);
    world.of.table[1] = world.of.pages() as u32;
    world.of.sequence_of[1] = 4;
    let memory = world.memory();
    let call = Attend { longest: 80, sequences: 4, ..world.call(0..4, &memory, false) };
    run(shim, &call.launch().unwrap(), 3)?;
    let out = read::<T>(&memory.out);
    let rows = out.chunks(case.width()).map(|row| {
        let lost = row.iter().filter(|x| x.widen().is_nan()).count();
        assert!(lost == 0 || lost == row.len(), "{row:?}");
        lost != 0
    });
    Ok(rows.collect())
}

#[test]
fn attention_that_does_not_fit_is_refused() {
    let world = World::<f32>::new(&Case::new(1, 2, 8, &[(70, 2)]), 3);
    let memory = world.memory();
    let call = world.call(0..2, &memory, false);
    assert!(call.launch().is_ok());
    let scratch = Buffer { bytes: memory.scratch.buffer().bytes - 1, ..memory.scratch.buffer() };
    assert!(matches!(Attend { scratch, ..call }.launch(), Err(LaunchError::TooSmall { .. })));
    let longest = world.of.table_width as u64 * PAGE_TOKENS;
    assert!(matches!(Attend { longest, ..call }.launch(), Err(LaunchError::OutOfRange { .. })));
    assert!(matches!(Attend { rows: 3, ..call }.launch(), Err(LaunchError::TooSmall { .. })));
    // Many calls share scratch memory, sized by the largest.
    let heads = call.heads;
    let most = heads.scratch_bytes(300, 5000);
    let fits = |rows, longest| heads.scratch_bytes(rows, longest) <= most;
    assert!((0..=300).all(|rows| fits(rows, 5000)) && (0..5000).step_by(100).all(|longest| fits(128, longest)));
}
