//! Splits a trace in two by the content of its requests, so that equal prompts lie on one side.

use semmoe_tables::{Trace, TraceBuilder, TraceRequest};

use crate::ProfilerError;
use crate::bad::check_share;

/// A trace to solve with and a trace to judge the result with; the second gets about `hold_out` (0..1) of the requests.
/// Which request goes where depends on its prompt's tokens alone: not on its place, its continuation or the other
/// requests.
///
/// # Errors
/// When the share is not between 0 and 1.
pub fn split(trace: &Trace, hold_out: f64) -> Result<(Trace, Trace), ProfilerError> {
    check_share("hold_out", hold_out)?;
    let held = |request: TraceRequest<'_>| is_held(request, hold_out);
    let solve = TraceBuilder::select(trace, |_, request| !held(request))?;
    let judge = TraceBuilder::select(trace, |_, request| held(request))?;
    Ok((solve, judge))
}

/// Whether a request belongs to the share that is held out.
pub(crate) fn is_held(request: TraceRequest<'_>, hold_out: f64) -> bool {
    // A number in 0..1, evenly spread, that depends on the prompt: the upper 53 bits are exact in an f64.
    let position = (request.prompt_hash(0) >> 11) as f64 / (1u64 << 53) as f64;
    position < hold_out
}
