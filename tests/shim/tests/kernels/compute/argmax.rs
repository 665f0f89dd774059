//! The token of the largest logit.

use fastrand::Rng;
use semmoe_kernels_cuda::compute::Argmax;
use semmoe_kernels_shim::{HostBuffer, Shim};
use semmoe_reference::data::same;

use super::run;
use crate::support::{holding, read, shim};

fn best(row: &[f32]) -> u32 {
    let better = |best: Option<usize>, id: usize| match best {
        Some(best) if row[best] >= row[id] => Some(best),
        _ => Some(id),
    };
    let best = (0..row.len()).filter(|&id| !row[id].is_nan()).fold(None, better);
    best.filter(|&id| row[id].is_finite()).map_or(Argmax::NONE, |id| id as u32)
}

/// Rows with few distinct logits, so that ties are common.
pub(super) fn argmax(shim: &Shim, rows: usize, vocab: usize, seed: u64) -> Result<(), String> {
    let mut rng = Rng::with_seed(seed);
    let values = [-3.5, -0.0, 0.0, 1.25, f32::NAN, f32::NEG_INFINITY];
    let logits: Vec<f32> = (0..rows)
        .flat_map(|row| {
            // Each row lacks some of the values.
            let most = values.len() - row % values.len();
            let mut row: Vec<f32> = (0..vocab).map(|_| values[values.len() - 1 - rng.usize(0..most)]).collect();
            if rng.bool() {
                row[rng.usize(0..vocab)] = 7.0;
            }
            row
        })
        .collect();
    check(shim, &logits, vocab, seed)
}

fn check(shim: &Shim, logits: &[f32], vocab: usize, seed: u64) -> Result<(), String> {
    let rows = logits.len() / vocab;
    let (memory, found) = (holding(logits), HostBuffer::poisoned(rows * 4));
    let call = Argmax { logits: memory.buffer(), best: found.buffer(), rows: rows as u64, vocab: vocab as u64 };
    run(shim, &[call.launch().unwrap()], seed)?;
    let expected: Vec<u32> = logits.chunks(vocab).map(best).collect();
    same("best", &read::<u32>(&found), &expected)
}

#[test]
fn the_largest_logit_wins_and_the_lowest_of_equal_ones() {
    let Some(shim) = shim() else { return };
    for (seed, (rows, vocab)) in [(1, 1), (3, 7), (7, 132), (12, 1000), (2, 5003), (1, 20_000)].into_iter().enumerate()
    {
        argmax(shim, rows, vocab, seed as u64).unwrap_or_else(|error| panic!("{rows} x {vocab}: {error}"));
    }
}

#[test]
fn nan_never_wins_and_a_largest_that_is_not_finite_is_no_token() {
    let Some(shim) = shim() else { return };
    let (nan, low, high) = (f32::NAN, f32::NEG_INFINITY, f32::INFINITY);
    check(shim, &[nan, nan, nan, nan, nan, low, nan, low, -0.0, 0.0, nan, nan], 4, 1).unwrap();
    check(shim, &[1.0, high, nan, 2.0, low, low, low, low, f32::MAX, f32::MIN, low, nan], 4, 1).unwrap();
}
