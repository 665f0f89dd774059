//! Reproductions of papers that semmoe's commands do not use. README.md has the figures and their commands.
//!
//! | module | what |
//! |---|---|
//! | [`sr`] | HybridEP's experts as sparse residuals on a shared expert: encode and decode |
//! | [`topology`], [`centres`] | HybridEP's communicating pairs, and all pairs of up to thousands of data centres |
//! | [`mixserve`] | MixServe's exchange on two levels of links, and the result of its equation 11 |
//! | [`rollout`] | ParaSMoE's times of a rollout, whole experts first and slices at the end |
//! | [`chart`] | charts as SVG, also for [bench/e2e](../e2e/README.md) |
//! | [`moebius`], [`phases`] | Moebius' switch policy, and the oracle that it is compared with |

pub mod centres;
pub mod chart;
pub mod mixserve;
pub mod moebius;
pub mod phases;
pub mod rollout;
pub mod sr;
pub mod topology;

use semmoe_planner::PlanError;

/// Returns `found` if it is finite and above 0.
fn positive(what: &'static str, found: f64) -> Result<f64, PlanError> {
    let expected = "a finite number above 0";
    if found.is_finite() && found > 0.0 { Ok(found) } else { Err(PlanError::Value { what, found, expected }) }
}

/// Checks that `found` is finite and at least 0.
fn not_negative(what: &'static str, found: f64) -> Result<(), PlanError> {
    if found == 0.0 { Ok(()) } else { positive(what, found).map(drop) }
}
