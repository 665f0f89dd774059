//! Placements of experts by other rules than the solver's, also for [bench/e2e](../e2e/README.md).

mod assignment;
pub mod baselines;
pub mod counts;
