//! Splits a trace in two by the content of its requests, so that equal prompts lie on one side.

use semmoe_tables::{Trace, TraceBuilder, TraceRequest};

use crate::ProfilerError;

/// A trace to solve with and a trace to judge the result with; the second gets about `hold_out` (0..1) of the requests. Which
/// request goes where depends on its prompt's tokens alone: not on its place, its continuation or the other requests.
///
/// # Errors
/// When the share is not between 0 and 1.
pub fn split(trace: &Trace, hold_out: f64) -> Result<(Trace, Trace), ProfilerError> {
    if !(0.0..=1.0).contains(&hold_out) {
        let (found, expected) = (hold_out.to_string(), "a share between 0 and 1");
        return Err(ProfilerError::Option { option: "hold_out", found, expected });
    }
    let held = |request: TraceRequest<'_>| position(&request.token_ids()[..request.prompt_len()]) < hold_out;
    let solve = TraceBuilder::select(trace, |_, request| !held(request))?;
    let judge = TraceBuilder::select(trace, |_, request| held(request))?;
    Ok((solve, judge))
}

/// A number in 0..1, evenly spread, that depends on every token (FNV-1a, then the finaliser of SplitMix64).
fn position(tokens: &[u32]) -> f64 {
    let bytes = tokens.iter().flat_map(|token| token.to_le_bytes());
    let fnv = bytes
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    let mixed = (fnv ^ (fnv >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    // The upper 53 bits are exact in an f64.
    ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}
