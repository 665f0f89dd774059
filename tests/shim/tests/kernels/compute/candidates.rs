//! Candidates that a token is drawn from.

use fastrand::Rng;
use semmoe_kernels_cuda::compute::{CandidateAsk, CandidateRow, Candidates};
use semmoe_kernels_shim::{HostBuffer, Shim};

use super::run;
use crate::support::{holding, read, shim};

const LARGEST: f32 = -1.0;
/// Of a sum of all weights: a weight's own places, and those of each cut-off to a unit.
const TOLERANCE: f64 = 1e-6;

/// Rows of a few likely tokens among others, each with a temperature of its own. The second asks for nothing, of three
/// others one for the largest.
pub(super) fn candidates(shim: &Shim, rows: usize, vocab: usize, seed: u64) -> Result<(), String> {
    let mut rng = Rng::with_seed(seed);
    let mut logits: Vec<f32> = (0..rows * vocab).map(|_| rng.f32() * 9.0 - 12.0).collect();
    for row in logits.chunks_mut(vocab) {
        (0..9).for_each(|_| row[rng.usize(0..vocab)] = rng.f32() * 8.0);
        row[rng.usize(0..vocab)] = f32::NAN;
    }
    let ask = |row: usize| match row {
        1 => CandidateAsk::default(),
        _ => CandidateAsk {
            scale: 0.3 + row as f32 / 2.0,
            drawn: if row.is_multiple_of(3) { LARGEST } else { rng.f32() },
        },
    };
    let asks: Vec<CandidateAsk> = (0..rows).map(ask).collect();
    check(shim, &logits, &asks, seed)
}

fn check(shim: &Shim, logits: &[f32], asks: &[CandidateAsk], seed: u64) -> Result<(), String> {
    let (rows, vocab) = (asks.len(), logits.len() / asks.len());
    let out = HostBuffer::poisoned(rows * size_of::<CandidateRow>());
    let (all, asked) = (holding(logits), holding(asks));
    let (rows, columns) = (rows as u64, vocab as u64);
    let call = Candidates { logits: all.buffer(), asks: asked.buffer(), out: out.buffer(), rows, vocab: columns };
    run(shim, &[call.launch().unwrap()], seed)?;
    for (row, ((found, ask), logits)) in
        read::<CandidateRow>(&out).iter().zip(asks).zip(logits.chunks(vocab)).enumerate()
    {
        check_row(found, *ask, logits).map_err(|error| format!("row {row}: {error}"))?;
    }
    Ok(())
}

fn check_row(found: &CandidateRow, ask: CandidateAsk, logits: &[f32]) -> Result<(), String> {
    if ask == CandidateAsk::default() {
        let untouched = [found.total, found.before] == [u64::MAX; 2] && found.ids == [u32::MAX; Candidates::MOST];
        return if untouched { Ok(()) } else { Err("not left out".to_owned()) };
    }
    let largest = logits.iter().copied().fold(f32::NAN, f32::max);
    let weight = |logit: &f32| {
        let weight = f64::from(((logit - largest) * ask.scale).exp());
        if weight.is_nan() { 0.0 } else { weight }
    };
    let total: f64 = logits.iter().map(weight).sum();
    let near = |what, found: u64, expected: f64| match (found as f64 / CandidateRow::UNITS - expected).abs() {
        difference if difference <= TOLERANCE * total => Ok(()),
        difference => Err(format!("{what} is {difference} off {expected}")),
    };
    near("the sum of all weights", found.total, total)?;
    if found.largest != largest && !(found.largest.is_nan() && largest.is_nan()) {
        return Err(format!("the largest logit is {}, expected {largest}", found.largest));
    }
    let count = found.count as usize;
    let (Some(ids), Some(values)) = (found.ids.get(..count), found.logits.get(..count)) else {
        return Err(format!("{count} candidates"));
    };
    if ids.iter().zip(values).any(|(id, value)| logits[*id as usize].to_bits() != value.to_bits()) {
        return Err("logits of other tokens".to_owned());
    }
    if ask.drawn < 0.0 || total == 0.0 {
        check_largest(ids, logits)
    } else {
        check_drawn(
            found,
            ids,
            ask,
            &|below| {
                near("the sum before", found.before, logits[..below].iter().map(weight).sum())?;
                let end = (below + count).min(logits.len());
                Ok(logits[below..end].iter().map(weight).sum::<f64>() / total)
            },
            total,
        )
    }
}

/// All different, and none of the others larger.
fn check_largest(ids: &[u32], logits: &[f32]) -> Result<(), String> {
    let ascending = |a: &f32, b: &f32| a.partial_cmp(b).unwrap_or(b.is_nan().cmp(&a.is_nan()));
    let mut expected: Vec<f32> = logits.to_vec();
    expected.sort_by(|a, b| ascending(b, a));
    expected.truncate(Candidates::MOST);
    let mut distinct = ids.to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    let mut values: Vec<f32> = distinct.iter().map(|id| logits[*id as usize]).collect();
    values.sort_by(|a, b| ascending(b, a));
    let same = |(a, b): (&f32, &f32)| a == b || a.is_nan() && b.is_nan();
    match values.len() == expected.len() && values.iter().zip(&expected).all(same) {
        true => Ok(()),
        false => Err(format!("the largest are {expected:?}, found {values:?}")),
    }
}

/// One after the other, and the drawn number falls among them.
fn check_drawn(
    found: &CandidateRow,
    ids: &[u32],
    ask: CandidateAsk,
    share: &dyn Fn(usize) -> Result<f64, String>,
    total: f64,
) -> Result<(), String> {
    let first = *ids.first().ok_or("no candidates")?;
    if !ids.iter().copied().eq(first..first + ids.len() as u32) {
        return Err(format!("the ids {ids:?} are not one after the other"));
    }
    let (begin, share) = (found.before as f64 / CandidateRow::UNITS / total, share(first as usize)?);
    let inside = begin - TOLERANCE..=begin + share + TOLERANCE;
    match inside.contains(&f64::from(ask.drawn)) {
        true => Ok(()),
        false => Err(format!("{} was drawn, which is not in {inside:?}", ask.drawn)),
    }
}

#[test]
fn candidates_are_the_largest_logits_or_those_around_the_drawn_one() {
    let Some(shim) = shim() else { return };
    for (seed, (rows, vocab)) in [(1, 10), (3, 33), (4, 1000), (7, 129), (3, 5003)].into_iter().enumerate() {
        candidates(shim, rows, vocab, seed as u64).unwrap_or_else(|error| panic!("{rows} x {vocab}: {error}"));
    }
    let asks = |drawn: &[f32]| drawn.iter().map(|&drawn| CandidateAsk { scale: 1.0, drawn }).collect::<Vec<_>>();
    // More equal ones than there is room for; the ends of the row.
    check(shim, &vec![1.0; 4 * 700], &asks(&[LARGEST, 0.0, 0.5, 1.0 - f32::EPSILON]), 1).unwrap();
    // No weight at all, and a largest that is not finite.
    let (nan, low, high) = (f32::NAN, f32::NEG_INFINITY, f32::INFINITY);
    check(shim, &[nan, nan, nan, nan, low, 1.0, high, low], &asks(&[0.5, 0.5]), 1).unwrap();
    check(shim, &[nan, nan, -0.0, 0.0, low, nan, 7.0, low], &asks(&[LARGEST, 0.9]), 1).unwrap();
}
