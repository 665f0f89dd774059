//! The compute kernels against plain references. Sums in another order differ in their last places, so rows are
//! compared with a tolerance; what a row's bits may depend on is compared exactly.

mod argmax;
mod matmul;

use semmoe_kernels_cuda::Launch;
use semmoe_kernels_shim::{Mutant, Shim, Step, StreamEnd};

/// Runs launches of one rank, in order.
pub(crate) fn run(shim: &Shim, launches: &[Launch], seed: u64) -> Result<(), String> {
    let steps = launches.iter().map(Step::Launch).collect();
    // SAFETY: every buffer outlives this call and is only borrowed after it.
    let ends = unsafe { shim.run(&[steps], seed, Mutant::None) }.map_err(|error| error.to_string())?;
    if ends == [StreamEnd::Done] { Ok(()) } else { Err("a kernel stopped".to_owned()) }
}

/// Small cases of all kernels that have barriers, to be noticed when one is left out.
pub(crate) fn results(shim: &Shim, seed: u64) -> Vec<(&'static str, Result<(), String>)> {
    let mut results = vec![("argmax", argmax::argmax(shim, 3, 1000, seed))];
    results.extend(matmul::results(shim, seed));
    results
}
