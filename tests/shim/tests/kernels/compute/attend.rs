//! Attention over pages against a softmax in f64; a row's bits in calls of every shape.

use fastrand::Rng;
use half::bf16;
use semmoe_kernels::Element;
use semmoe_kernels_cuda::compute::{Attend, PAGE_TOKENS, PagedHeads};
use semmoe_kernels_cuda::{Buffer, LaunchError};
use semmoe_kernels_shim::{HostBuffer, Shim};
use semmoe_reference::data::same;

use super::{close, numbers, run};
use crate::support::{holding, read, shim};

const LAYERS: usize = 2;
const LAYER: usize = 1;
const TOKENS: usize = PAGE_TOKENS as usize;

/// Sequences, each with the tokens that it has and the rows that are computed, its last ones.
#[derive(Clone, Debug)]
pub(super) struct Case {
    kv_heads: usize,
    group: usize,
    dim: usize,
    sequences: Vec<(usize, usize)>,
}

impl Case {
    fn new(kv_heads: usize, group: usize, dim: usize, sequences: &[(usize, usize)]) -> Self {
        Self { kv_heads, group, dim, sequences: sequences.to_vec() }
    }

    /// Several passes of a block over a row's queries, and several of them over columns of values.
    pub(super) fn of_barriers(dim: usize) -> Self {
        Self::new(1, 40, dim, &[(130, 1)])
    }

    fn head_elements(&self) -> usize {
        2 * TOKENS * self.dim
    }

    fn rows(&self) -> usize {
        self.sequences.iter().map(|(_, rows)| rows).sum()
    }

    fn width(&self) -> usize {
        self.kv_heads * self.group * self.dim
    }

    fn scale(&self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }
}

/// A case's memory.
struct World<T> {
    case: Case,
    queries: Vec<T>,
    /// Of each sequence `[kv_heads, tokens, dim]`.
    keys: Vec<Vec<T>>,
    values: Vec<Vec<T>>,
    positions: Vec<u32>,
    sequence_of: Vec<u32>,
    table_width: usize,
    pages: usize,
    table: Vec<u32>,
    pool: HostBuffer,
}

impl<T: Element> World<T> {
    fn new(case: &Case, seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let longest = case.sequences.iter().map(|(tokens, _)| *tokens).max().unwrap();
        let (count, table_width) = (case.sequences.len(), longest.div_ceil(TOKENS) + 1);
        let pages = count * table_width;
        let mut order: Vec<u32> = (0..pages as u32).collect();
        rng.shuffle(&mut order);
        let page_elements = LAYERS * case.kv_heads * case.head_elements();
        // All is poisoned that lies behind a sequence's end.
        let mut pool = vec![T::round(f32::NAN); pages * page_elements];
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (sequence, (tokens, _)) in case.sequences.iter().enumerate() {
            let of_keys: Vec<T> = numbers(&mut rng, case.kv_heads * tokens * case.dim);
            let of_values: Vec<T> = numbers(&mut rng, case.kv_heads * tokens * case.dim);
            for (at, (&key, &value)) in of_keys.iter().zip(&of_values).enumerate() {
                let (head, token, i) = (at / case.dim / tokens, at / case.dim % tokens, at % case.dim);
                let page = order[sequence * table_width + token / TOKENS] as usize;
                let begins = page * page_elements + (LAYER * case.kv_heads + head) * case.head_elements();
                pool[begins + i * TOKENS + token % TOKENS] = key;
                pool[begins + (TOKENS + token % TOKENS) * case.dim + i] = value;
            }
            keys.push(of_keys);
            values.push(of_values);
        }
        let rows = |(sequence, (tokens, rows)): (usize, &(usize, usize))| {
            (tokens - rows..*tokens).map(move |position| (position as u32, sequence as u32)).collect::<Vec<_>>()
        };
        let (positions, sequence_of) = case.sequences.iter().enumerate().flat_map(rows).unzip();
        let queries = numbers(&mut rng, case.rows() * case.width());
        let pool = holding(&pool);
        let case = case.clone();
        Self { case, queries, keys, values, positions, sequence_of, table_width, pages, table: order, pool }
    }

    fn expected_row(&self, row: usize) -> Vec<f64> {
        let Case { kv_heads, group, dim, ref sequences } = self.case;
        let (sequence, sees) = (self.sequence_of[row] as usize, self.positions[row] as usize + 1);
        let tokens = sequences[sequence].0;
        let mut out = Vec::new();
        for head in 0..kv_heads * group {
            let query = &self.queries[row * self.case.width() + head * dim..][..dim];
            let of_head = |list: &[Vec<T>]| list[sequence][head / group * tokens * dim..][..sees * dim].to_vec();
            let (keys, values) = (of_head(&self.keys), of_head(&self.values));
            let dot = |key: &[T]| -> f64 {
                let sum: f64 = key.iter().zip(query).map(|(k, q)| f64::from(k.widen()) * f64::from(q.widen())).sum();
                (sum * f64::from(self.case.scale())).exp()
            };
            let weights: Vec<f64> = keys.chunks(dim).map(dot).collect();
            let total: f64 = weights.iter().sum();
            out.extend((0..dim).map(|i| {
                let sum: f64 =
                    values.chunks(dim).zip(&weights).map(|(value, weight)| f64::from(value[i].widen()) * weight).sum();
                sum / total
            }));
        }
        out
    }

    /// A call of some rows; more sequences than there are keep a block's rows apart.
    fn call(&self, rows: std::ops::Range<usize>, memory: &Memory, apart: bool) -> Attend {
        let Case { kv_heads, group, dim, .. } = self.case;
        let from = |buffer: Buffer, bytes: usize| buffer.from_offset((rows.start * bytes) as u64);
        let most = self.positions[rows.clone()].iter().max().copied().unwrap_or_default();
        Attend {
            heads: PagedHeads {
                pool: self.pool.buffer(),
                pages: self.pages as u64,
                layer: LAYER as u64,
                layers: LAYERS as u64,
                kv_heads: kv_heads as u64,
                group: group as u64,
                dim: dim as u64,
                dtype: T::DTYPE,
            },
            scale: self.case.scale(),
            queries: from(memory.queries.buffer(), self.case.width() * size_of::<T>()),
            positions: from(memory.positions.buffer(), 4),
            sequence_of: from(memory.sequence_of.buffer(), 4),
            page_table: memory.table.buffer(),
            sequences: if apart { memory.most_sequences } else { self.case.sequences.len() as u64 },
            table_width: self.table_width as u64,
            longest: most.into(),
            scratch: memory.scratch.buffer(),
            out: from(memory.out.buffer(), self.case.width() * size_of::<T>()),
            rows: rows.len() as u64,
        }
    }

    fn memory(&self) -> Memory {
        let rows = self.case.rows();
        let heads = self.call(0..0, &Memory::default(), false).heads;
        // A table with rows of nothing: as many as there are rows.
        let mut table = self.table.clone();
        let most_sequences = self.case.sequences.len().max(rows);
        table.resize(most_sequences * self.table_width, u32::MAX);
        let longest = *self.positions.iter().max().unwrap();
        Memory {
            queries: holding(&self.queries),
            positions: holding(&self.positions),
            sequence_of: holding(&self.sequence_of),
            table: holding(&table),
            most_sequences: most_sequences as u64,
            scratch: HostBuffer::poisoned(heads.scratch_bytes(rows as u64, longest.into()) as usize),
            out: HostBuffer::poisoned(rows * self.case.width() * size_of::<T>()),
        }
    }

    /// All rows, in calls of some rows each.
    fn run(&self, shim: &Shim, rows_of_call: usize, apart: bool, seed: u64) -> Result<Vec<T>, String> {
        let memory = self.memory();
        for first in (0..self.case.rows()).step_by(rows_of_call) {
            let rows = first..self.case.rows().min(first + rows_of_call);
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

/// All rows in one call, which gives them.
fn at_once<T: Element>(shim: &Shim, world: &World<T>, seed: u64) -> Result<Vec<T>, String> {
    let rows = world.case.rows();
    let found = world.run(shim, rows, false, seed)?;
    let expected: Vec<f64> = (0..rows).flat_map(|row| world.expected_row(row)).collect();
    close("attention", &found, &expected)?;
    Ok(found)
}

pub(super) fn attend<T: Element>(shim: &Shim, case: &Case, seed: u64) -> Result<(), String> {
    at_once(shim, &World::<T>::new(case, seed), seed).map(drop)
}

/// The same bits in one call, in calls of a few rows, and with blocks of one row.
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
        // More queries of a row than a block takes at once.
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
    // All rows: one block folds the splits; a hundred at a time: each split has its own.
    let case = Case::new(1, 1, 8, &[(127, 127), (600, 3)]);
    all_ways::<bf16>(shim, &case, 100, 1).unwrap();
    all_ways::<f32>(shim, &case, 100, 1).unwrap();
}

#[test]
fn what_the_tables_do_not_have_gives_nan() {
    let Some(shim) = shim() else { return };
    let case = Case::new(1, 2, 8, &[(70, 1), (5, 1), (10, 1), (20, 1)]);
    for tensor in [true, false] {
        let found = if tensor { lost::<bf16>(shim, &case) } else { lost::<f32>(shim, &case) };
        let expected = [true, true, false, true];
        assert_eq!(found.unwrap(), expected, "tensor products: {tensor}");
    }
}

/// Which rows are NaN when the first's second page, the second's sequence and the last's position are not there.
fn lost<T: Element>(shim: &Shim, case: &Case) -> Result<Vec<bool>, String> {
    let mut world = World::<T>::new(case, 3);
    world.table[1] = world.pages as u32;
    world.sequence_of[1] = 4;
    world.positions[3] = 128;
    let memory = world.memory();
    let call = Attend { longest: 100, sequences: 4, ..world.call(0..4, &memory, false) };
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
    let longest = world.table_width as u64 * PAGE_TOKENS;
    assert!(matches!(Attend { longest, ..call }.launch(), Err(LaunchError::OutOfRange { .. })));
    assert!(matches!(Attend { rows: 3, ..call }.launch(), Err(LaunchError::TooSmall { .. })));
    // The scratch memory of many calls is that of the largest.
    let heads = call.heads;
    let most = heads.scratch_bytes(300, 5000);
    let fits = |rows, longest| heads.scratch_bytes(rows, longest) <= most;
    assert!((0..=300).all(|rows| fits(rows, 5000)) && (0..5000).step_by(100).all(|longest| fits(128, longest)));
}
