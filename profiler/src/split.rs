//! Splits a trace in two by prompt content, so that equal prompts stay on the same side.

use semmoe_tables::{PromptSplit, Trace, TraceBuilder, TraceRequest};

use crate::ProfilerError;
use crate::error::check_share;

/// Returns a trace to count and a trace to evaluate on; the latter gets about a fraction `hold_out` (0..1) of the
/// requests. Only a prompt's tokens determine its side, not its position, its continuation or other requests.
///
/// # Errors
/// If the fraction is not between 0 and 1.
pub fn split(trace: &Trace, hold_out: f64) -> Result<(Trace, Trace), ProfilerError> {
    check_share("hold_out", hold_out)?;
    let held = |request: TraceRequest<'_>| PromptSplit::STUDY.position(request) < hold_out;
    let solve = TraceBuilder::select(trace, |_, request| !held(request))?;
    let judge = TraceBuilder::select(trace, |_, request| held(request))?;
    Ok((solve, judge))
}
