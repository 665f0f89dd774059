//! Times kernels, and reports the times.

use serde_json::Value;

use crate::machine::{Machine, Prepared, median};

/// A JSON document, and whether every check passed.
pub(crate) type Report = Result<(Value, bool), String>;

/// Sizes and repetitions.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) tokens: usize,
    pub(crate) hidden: usize,
    pub(crate) warm_up: usize,
    pub(crate) runs: usize,
    /// Minimum number of calls of each kernel in one measurement.
    pub(crate) at_once: usize,
}

/// Replays each in turn and returns the median of each in microseconds.
pub(crate) fn in_turns(machine: &Machine, plan: Plan, prepared: &[Prepared]) -> Result<Vec<f64>, String> {
    let mut times = vec![Vec::with_capacity(plan.runs); prepared.len()];
    for run in 0..plan.warm_up + plan.runs {
        for (prepared, times) in prepared.iter().zip(&mut times) {
            let took = machine.time(prepared)?;
            if run >= plan.warm_up {
                times.push(took);
            }
        }
    }
    Ok(times.into_iter().map(median).collect())
}
