//! Row kernels against simple loops.

use fastrand::Rng;
use half::bf16;
use semmoe_kernels::Element;
use semmoe_kernels_cuda::compute::{AddRows, Embed, Norm, SumPairs};
use semmoe_kernels_cuda::{Buffer, LaunchError};
use semmoe_kernels_shim::{HostBuffer, Shim};
use semmoe_reference::data::same;

use super::{close, numbers, run};
use crate::support::{holding, read, shim};

const EPSILON: f32 = 1e-5;

fn embed<T: Element>(shim: &Shim, rows: usize, hidden: usize, seed: u64) -> Result<(), String> {
    let mut rng = Rng::with_seed(seed);
    let vocab = 11;
    let table: Vec<T> = numbers(&mut rng, vocab * hidden);
    // Some are not in the table.
    let tokens: Vec<u32> = (0..rows).map(|row| [rng.u32(0..11), 10, 11, u32::MAX][(row + seed as usize) % 4]).collect();
    let (table_at, tokens_at) = (holding(&table), holding(&tokens));
    let out = HostBuffer::poisoned(rows * hidden * size_of::<T>());
    let call = Embed {
        table: table_at.buffer(),
        tokens: tokens_at.buffer(),
        out: out.buffer(),
        rows: rows as u64,
        hidden: hidden as u64,
        vocab: vocab as u64,
        dtype: T::DTYPE,
    };
    run(shim, &[call.launch().unwrap()], seed)?;
    let row = |token: &u32| match table.get(*token as usize * hidden..(*token as usize + 1) * hidden) {
        Some(row) => row.to_vec(),
        None => vec![T::round(f32::NAN); hidden],
    };
    same("rows of the table", &read(&out), &tokens.iter().flat_map(row).collect::<Vec<T>>())
}

#[test]
fn a_row_of_the_table_for_each_token_and_nan_for_none() {
    let Some(shim) = shim() else { return };
    for (seed, (rows, hidden)) in [(0, 8), (1, 1), (7, 24), (3, 36), (6, 2056)].into_iter().enumerate() {
        embed::<f32>(shim, rows, hidden, seed as u64).unwrap();
        embed::<bf16>(shim, rows, hidden, seed as u64).unwrap();
    }
}

/// A norm of all rows, after a sum, or of listed rows.
#[derive(Clone, Copy)]
pub(super) struct NormCase {
    rows: usize,
    hidden: usize,
    added: bool,
    listed: bool,
}

impl NormCase {
    pub(super) fn new(rows: usize, hidden: usize) -> Self {
        Self { rows, hidden, added: false, listed: false }
    }
}

fn normed(row: &[f64], weight: &[f32]) -> Vec<f64> {
    let squares: f64 = row.iter().map(|x| x * x).sum();
    let root = (squares / row.len() as f64 + f64::from(EPSILON)).sqrt();
    row.iter().zip(weight).map(|(x, weight)| x / root * f64::from(*weight)).collect()
}

pub(super) fn norm<T: Element>(shim: &Shim, case: NormCase, seed: u64) -> Result<(), String> {
    let NormCase { rows, hidden, .. } = case;
    let mut rng = Rng::with_seed(seed);
    let (before, more): (Vec<T>, Vec<T>) = (numbers(&mut rng, rows * hidden), numbers(&mut rng, rows * hidden));
    let weight: Vec<f32> = numbers(&mut rng, hidden);
    // Some rows do not exist.
    let list: Vec<u32> = (0..rows).map(|_| rng.u32(0..rows as u32 + 1)).collect();
    let [residual, added] = [&before, &more].map(|rows| holding(rows));
    let (weight_at, list_at) = (holding(&weight), holding(&list));
    let out = HostBuffer::poisoned(rows * hidden * size_of::<T>());
    let call = Norm {
        residual: residual.buffer(),
        added: case.added.then_some(added.buffer()),
        row_of: case.listed.then_some(list_at.buffer()),
        weight: weight_at.buffer(),
        out: out.buffer(),
        rows: rows as u64,
        hidden: hidden as u64,
        epsilon: EPSILON,
        dtype: T::DTYPE,
    };
    run(shim, &[call.launch().unwrap()], seed)?;
    let sum = |(a, b): (&T, &T)| T::round(a.widen() + b.widen());
    let after: Vec<T> = if case.added { before.iter().zip(&more).map(sum).collect() } else { before };
    same("residual", &read(&residual), &after)?;
    let wide: Vec<Vec<f64>> = after.chunks(hidden).map(|row| row.iter().map(|x| x.widen().into()).collect()).collect();
    let lost = vec![f64::NAN; hidden];
    let source = |row| if case.listed { wide.get(list[row] as usize).unwrap_or(&lost) } else { &wide[row] };
    let expected: Vec<f64> = (0..rows).flat_map(|row| normed(source(row), &weight)).collect();
    let found = read::<T>(&out);
    close("normed rows", &found, &expected)?;
    // Computed alone, the last row is equal.
    let alone = HostBuffer::poisoned(hidden * size_of::<T>());
    let last = |buffer: Buffer| buffer.from_offset(((rows - 1) * hidden * size_of::<T>()) as u64);
    let row_of = call.row_of.map(|list| list.from_offset((rows as u64 - 1) * 4));
    let first = if case.listed { residual.buffer() } else { last(residual.buffer()) };
    let call = Norm { residual: first, added: None, row_of, out: alone.buffer(), rows: 1, ..call };
    run(shim, &[call.launch().unwrap()], seed + 1)?;
    same("the last row alone", &read::<T>(&alone), &found[(rows - 1) * hidden..])
}

#[test]
fn rows_are_normed_after_their_sum_and_by_a_list() {
    let Some(shim) = shim() else { return };
    // Rows of whole vectors and not, in one warp and in many, and longer than a block's registers.
    for (seed, (rows, hidden)) in [(5, 24), (3, 36), (2, 1), (3, 1024), (1, 1031), (1, 8208)].into_iter().enumerate() {
        for (added, listed) in [(false, false), (true, false), (false, true)] {
            let case = NormCase { added, listed, ..NormCase::new(rows, hidden) };
            norm::<f32>(shim, case, seed as u64).unwrap_or_else(|error| panic!("{rows} x {hidden}: {error}"));
            norm::<bf16>(shim, case, seed as u64).unwrap_or_else(|error| panic!("{rows} x {hidden}: {error}"));
        }
    }
}

fn add_rows<T: Element>(shim: &Shim, rows: usize, hidden: usize, gated: bool) -> Result<(), String> {
    let mut rng = Rng::with_seed(hidden as u64);
    let (before, more): (Vec<T>, Vec<T>) = (numbers(&mut rng, rows * hidden), numbers(&mut rng, rows * hidden));
    let gates: Vec<f32> = (0..rows).map(|row| [0.5, -3.0, 90.0, -90.0][row % 4]).collect();
    let (residual, added, gate) = (holding(&before), holding(&more), holding(&gates));
    let call = AddRows {
        residual: residual.buffer(),
        added: added.buffer(),
        gate: gated.then_some(gate.buffer()),
        rows: rows as u64,
        hidden: hidden as u64,
        dtype: T::DTYPE,
    };
    run(shim, &[call.launch().unwrap()], 1)?;
    let expected = before.iter().zip(&more).enumerate().map(|(at, (a, b))| {
        let factor = if gated { 1.0 / (1.0 + (-f64::from(gates[at / hidden])).exp()) } else { 1.0 };
        f64::from(a.widen()) + factor * f64::from(b.widen())
    });
    close("sums", &read::<T>(&residual), &expected.collect::<Vec<_>>())
}

#[test]
fn rows_are_added_whole_or_by_their_gate() {
    let Some(shim) = shim() else { return };
    for (rows, hidden) in [(0, 8), (5, 24), (4, 36), (3, 2056)] {
        for gated in [false, true] {
            add_rows::<f32>(shim, rows, hidden, gated).unwrap();
            add_rows::<bf16>(shim, rows, hidden, gated).unwrap();
        }
    }
}

fn sum_pairs<T: Element>(shim: &Shim, counts: &[usize], hidden: usize) -> Result<(), String> {
    let mut rng = Rng::with_seed(hidden as u64);
    let pairs: usize = counts.iter().sum();
    let y: Vec<T> = numbers(&mut rng, pairs * hidden);
    let weights: Vec<f32> = numbers(&mut rng, pairs);
    let mut pair_of: Vec<u32> = (0..pairs as u32).collect();
    rng.shuffle(&mut pair_of);
    let ends = counts.iter().scan(0, |end, count| {
        *end += *count as u32;
        Some(*end)
    });
    let mut first_pair: Vec<u32> = std::iter::once(0).chain(ends).collect();
    // The last row is past the end.
    let rows = counts.len() + 1;
    first_pair.push(pairs as u32 + 1);
    let rows_of = [holding(&first_pair), holding(&pair_of), holding(&weights)];
    let (y_at, out) = (holding(&y), HostBuffer::poisoned(rows * hidden * size_of::<T>()));
    let [first, order, weights_at] = rows_of.each_ref().map(HostBuffer::buffer);
    let call = SumPairs {
        y: y_at.buffer(),
        first_pair: first,
        pair_of: order,
        weights: weights_at,
        out: out.buffer(),
        pairs: pairs as u64,
        rows: rows as u64,
        hidden: hidden as u64,
        dtype: T::DTYPE,
    };
    run(shim, &[call.launch().unwrap()], 3)?;
    let mut expected = Vec::new();
    for range in first_pair.windows(2).take(counts.len()) {
        let mut sums = vec![0.0f32; hidden];
        for &pair in &pair_of[range[0] as usize..range[1] as usize] {
            let row = &y[pair as usize * hidden..][..hidden];
            sums.iter_mut().zip(row).for_each(|(sum, y)| *sum += weights[pair as usize] * y.widen());
        }
        expected.extend(sums.into_iter().map(T::round));
    }
    expected.extend(vec![T::round(f32::NAN); hidden]);
    same("sums", &read::<T>(&out), &expected)
}

#[test]
fn pairs_are_summed_in_their_order() {
    let Some(shim) = shim() else { return };
    for hidden in [24, 36, 1, 264] {
        sum_pairs::<f32>(shim, &[2, 0, 8, 5, 1, 4], hidden).unwrap();
        sum_pairs::<bf16>(shim, &[2, 0, 8, 5, 1, 4], hidden).unwrap();
    }
    sum_pairs::<f32>(shim, &[0], 8).unwrap();
}

#[test]
fn a_pair_that_is_not_there_gives_nan() {
    let Some(shim) = shim() else { return };
    let (y, weights) = (holding(&[1.0f32; 8]), holding(&[1.0f32; 2]));
    let (first_pair, pair_of) = (holding(&[0u32, 1, 2]), holding(&[1u32, 2]));
    let out = HostBuffer::poisoned(32);
    let call = SumPairs {
        y: y.buffer(),
        first_pair: first_pair.buffer(),
        pair_of: pair_of.buffer(),
        weights: weights.buffer(),
        out: out.buffer(),
        pairs: 2,
        rows: 2,
        hidden: 4,
        dtype: f32::DTYPE,
    };
    run(shim, &[call.launch().unwrap()], 3).unwrap();
    close("sums", &read::<f32>(&out), &[[1.0; 4], [f64::NAN; 4]].concat()).unwrap();
}

#[test]
fn what_does_not_fit_is_refused() {
    let memory = HostBuffer::zeroed(256);
    let all = memory.buffer();
    let norm = Norm {
        residual: all,
        added: None,
        row_of: None,
        weight: all,
        out: all,
        rows: 4,
        hidden: 16,
        epsilon: EPSILON,
        dtype: f32::DTYPE,
    };
    assert!(norm.launch().is_ok());
    let too_small = |call: Norm| matches!(call.launch(), Err(LaunchError::TooSmall { .. }));
    assert!(too_small(Norm { rows: 5, ..norm }) && too_small(Norm { hidden: 32, ..norm }));
    let askew = all.from_offset(4);
    let misaligned = |call: Norm| matches!(call.launch(), Err(LaunchError::Misaligned { .. }));
    assert!(misaligned(Norm { weight: askew, ..norm }) && misaligned(Norm { rows: 3, out: askew, ..norm }));
    // Rows of three elements are read element by element.
    assert!(Norm { hidden: 3, out: askew, weight: askew, ..norm }.launch().is_ok());
    let both = Norm { added: Some(all), row_of: Some(all), ..norm };
    assert!(matches!(both.launch(), Err(LaunchError::OutOfRange { .. })));
    let half = Norm { dtype: semmoe_kernels::Dtype::F16, ..norm };
    assert!(matches!(half.launch(), Err(LaunchError::Element { .. })));
}
