//! The compute kernels against plain references. Sums in another order differ in their last places, so rows are
//! compared with a tolerance; anything that must not affect a row's bits is compared exactly.

mod argmax;
mod attend;
mod candidates;
mod heads;
mod matmul;
mod route;
mod rows;
mod sort_pairs;

use fastrand::Rng;
use semmoe_kernels::{Dtype, Element};
use semmoe_kernels_cuda::Launch;
use semmoe_kernels_shim::{Mutant, Shim, Step, StreamEnd};

/// Runs launches of one rank, in order.
pub(crate) fn run(shim: &Shim, launches: &[Launch], seed: u64) -> Result<(), String> {
    let steps = launches.iter().map(Step::Launch).collect();
    // SAFETY: every buffer outlives this call and is only borrowed after it.
    let ends = unsafe { shim.run(&[steps], seed, Mutant::None) }.map_err(|error| error.to_string())?;
    if ends == [StreamEnd::Done] { Ok(()) } else { Err("a kernel stopped".to_owned()) }
}

/// Random values from -1 to 1.
fn numbers<T: Element>(rng: &mut Rng, count: usize) -> Vec<T> {
    (0..count).map(|_| T::round(rng.f32() * 2.0 - 1.0)).collect()
}

/// Compares with a reference in f64: within a few units in the last place of f32, or one of bf16.
fn close<T: Element>(what: &str, found: &[T], expected: &[f64]) -> Result<(), String> {
    let tolerance = if T::DTYPE == Dtype::F32 { 2e-6 } else { 1.0 / 256.0 };
    let differ = |(found, expected): (&T, &f64)| {
        let found = f64::from(found.widen());
        found.is_nan() != expected.is_nan() || (found - expected).abs() > tolerance * expected.abs().max(0.5)
    };
    match found.iter().zip(expected).position(differ) {
        _ if found.len() != expected.len() => Err(format!("{what}: {} of {} found", found.len(), expected.len())),
        Some(at) => Err(format!("{what}: {:?} found, {} expected at {at}", found[at], expected[at])),
        None => Ok(()),
    }
}

/// Small cases of all kernels with barriers, which must notice when one is omitted.
pub(crate) fn results(shim: &Shim, seed: u64) -> Vec<(&'static str, Result<(), String>)> {
    let mut results = vec![
        ("argmax", argmax::argmax(shim, 3, 1000, seed)),
        ("candidates", candidates::candidates(shim, 3, 1000, seed)),
        ("sorted pairs", sort_pairs::sort_pairs(shim, sort_pairs::CASES[2], seed)),
        ("sorted pairs", sort_pairs::sort_pairs(shim, sort_pairs::CASES[4], seed)),
        ("arrived pairs", sort_pairs::sort_arrived(shim, sort_pairs::CASES[3], 41, seed)),
        ("norm", rows::norm::<f32>(shim, rows::NormCase::new(2, 260), seed)),
        ("heads", heads::heads::<f32>(shim, &heads::Case::of_whole_norm(), seed)),
        ("attention", attend::attend::<half::bf16>(shim, &attend::case_of_barriers(72), seed)),
        ("attention", attend::attend::<f32>(shim, &attend::case_of_barriers(4), seed)),
    ];
    results.extend(matmul::results(shim, seed));
    results
}
