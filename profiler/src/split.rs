//! Splits a trace in two by the content of its requests, so that equal prompts lie on one side.

use semmoe_tables::{PromptSplit, Trace, TraceBuilder, TraceRequest};

use crate::ProfilerError;
use crate::bad::check_share;

/// A trace to count and a trace to judge what was counted; the second gets about `hold_out` (0..1) of the requests.
/// Which request goes where depends on its prompt's tokens alone: not on its place, its continuation or the other
/// requests.
///
/// # Errors
/// When the share is not between 0 and 1.
pub fn split(trace: &Trace, hold_out: f64) -> Result<(Trace, Trace), ProfilerError> {
    check_share("hold_out", hold_out)?;
    let held = |request: TraceRequest<'_>| PromptSplit::STUDY.position(request) < hold_out;
    let solve = TraceBuilder::select(trace, |_, request| !held(request))?;
    let judge = TraceBuilder::select(trace, |_, request| held(request))?;
    Ok((solve, judge))
}
