//! The way back: partial sums of the ranks into the tokens' order.

use crate::dispatch::DispatchPlan;
use crate::error::{KernelError, check_len};

/// Adds up what the ranks returned for each token.
///
/// - `partials` `[R, H]`: for each row of the plan, the sum of weight x expert(row) over that row's experts
/// - `out` `[n, H]`: overwritten
///
/// A token's partial sums are added in f32 in rank order 0..P, whatever order they arrived in, so that the result depends on
/// the placement alone.
///
/// # Errors
/// Lengths that do not fit the plan.
pub fn combine(plan: &DispatchPlan, partials: &[f32], hidden: usize, out: &mut [f32]) -> Result<(), KernelError> {
    check_len("partials", partials.len(), plan.rows() * hidden)?;
    check_len("out", out.len(), plan.tokens() * hidden)?;
    out.fill(0.0);
    if hidden == 0 {
        return Ok(());
    }
    // Rows are ordered by rank first: walking them in order is adding in rank order.
    for (&token, partial) in plan.row_tokens().iter().zip(partials.chunks_exact(hidden)) {
        let row = &mut out[token as usize * hidden..][..hidden];
        for (sum, value) in row.iter_mut().zip(partial) {
            *sum += value;
        }
    }
    Ok(())
}
