//! Arrival times and lengths of requests, from published traces.

use std::path::Path;

use serde::Deserialize;

use crate::error::ReplayError;

/// Tokens per block in Mooncake's trace; all prompts are cut into blocks of this size.
pub(crate) const BLOCK_TOKENS: u32 = 512;

/// Limit for prompts and answers; longer ones are refused.
const MAX_TOKENS: u64 = 1 << 24;

/// One request of a trace.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Arrival {
    /// Seconds since the first one.
    pub(crate) at: f64,
    /// At least 1.
    pub(crate) prompt_tokens: u32,
    /// At least 1.
    pub(crate) output_tokens: u32,
    /// Names of the prompt's blocks of [`BLOCK_TOKENS`]; the last one may be partial. Equal names mean equal text after
    /// equal text. Empty if the trace has none: then no prompts share a prefix.
    pub(crate) blocks: Vec<u64>,
}

/// Parses a line.
type Parse = fn(&str) -> Result<Arrival, String>;

/// A line of Mooncake's trace.
#[derive(Deserialize)]
struct MooncakeLine {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

/// Reads Mooncake's JSON lines (`.jsonl`) or Azure's CSV (`.csv`), in order of time.
pub(crate) fn read(path: &Path) -> Result<Vec<Arrival>, ReplayError> {
    let name = || path.display().to_string();
    let text =
        std::fs::read_to_string(path).map_err(|error| ReplayError::Read { path: name(), cause: error.to_string() })?;
    let (parse, header): (Parse, _) = match path.extension().and_then(|extension| extension.to_str()) {
        Some("jsonl") => (mooncake, 0),
        Some("csv") => (azure, 1),
        _ => return Err(ReplayError::Input { found: name(), expected: "a .jsonl (Mooncake) or a .csv (Azure)" }),
    };
    let lines = text.lines().enumerate().skip(header).filter(|(_, line)| !line.trim().is_empty());
    let mut arrivals = lines
        .map(|(at, line)| parse(line).map_err(|cause| ReplayError::Line { path: name(), line: at + 1, cause }))
        .collect::<Result<Vec<_>, _>>()?;
    if arrivals.is_empty() {
        return Err(ReplayError::Input { found: format!("{} has no requests", name()), expected: "at least one" });
    }
    arrivals.sort_by(|a, b| a.at.total_cmp(&b.at));
    let first = arrivals[0].at;
    arrivals.iter_mut().for_each(|arrival| arrival.at -= first);
    Ok(arrivals)
}

fn tokens(name: &str, found: u64) -> Result<u32, String> {
    if found > MAX_TOKENS {
        return Err(format!("{name} is {found}, expected at most {MAX_TOKENS}"));
    }
    Ok((found as u32).max(1))
}

fn mooncake(line: &str) -> Result<Arrival, String> {
    let line: MooncakeLine = serde_json::from_str(line).map_err(|error| error.to_string())?;
    let prompt_tokens = tokens("input_length", line.input_length)?;
    let expected = prompt_tokens.div_ceil(BLOCK_TOKENS) as usize;
    if line.hash_ids.len() != expected {
        return Err(format!("{} hash_ids for {prompt_tokens} tokens, expected {expected}", line.hash_ids.len()));
    }
    Ok(Arrival {
        at: finite(line.timestamp)? / 1e3,
        prompt_tokens,
        output_tokens: tokens("output_length", line.output_length)?,
        blocks: line.hash_ids,
    })
}

/// `TIMESTAMP,ContextTokens,GeneratedTokens`, the time as `2023-11-16 18:17:03.9799600`.
fn azure(line: &str) -> Result<Arrival, String> {
    let fields: Vec<&str> = line.split(',').map(str::trim).collect();
    let [time, context, generated] = fields[..] else {
        return Err(format!("{} fields, expected 3", fields.len()));
    };
    let count = |name: &str, field: &str| {
        tokens(name, field.parse().map_err(|_| format!("{name} is '{field}', expected a number"))?)
    };
    Ok(Arrival {
        at: seconds(time).ok_or_else(|| format!("the time is '{time}', expected YYYY-MM-DD hh:mm:ss.fff"))?,
        prompt_tokens: count("ContextTokens", context)?,
        output_tokens: count("GeneratedTokens", generated)?,
        blocks: Vec::new(),
    })
}

/// Seconds since the first of the month; the traces span an hour.
fn seconds(time: &str) -> Option<f64> {
    let (date, clock) = time.split_once(' ')?;
    let day: f64 = date.rsplit('-').next()?.parse().ok()?;
    let mut parts = clock.split(':').map(|part| part.parse::<f64>().ok());
    let (hours, minutes, seconds) = (parts.next()??, parts.next()??, parts.next()??);
    finite(((day * 24.0 + hours) * 60.0 + minutes) * 60.0 + seconds).ok()
}

fn finite(value: f64) -> Result<f64, String> {
    if value.is_finite() && value >= 0.0 { Ok(value) } else { Err(format!("the time is {value}, expected 0 or more")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_both_traces() {
        let line = r#"{"timestamp": 1500, "input_length": 600, "output_length": 0, "hash_ids": [0, 9]}"#;
        let expected = Arrival { at: 1.5, prompt_tokens: 600, output_tokens: 1, blocks: vec![0, 9] };
        assert_eq!(mooncake(line), Ok(expected));
        let found = azure("2023-11-16 00:01:02.5000000,4808,10").unwrap();
        assert_eq!((found.at, found.prompt_tokens, found.output_tokens), (16.0 * 86400.0 + 62.5, 4808, 10));
        for wrong in ["", "a,b,c", "2023-11-16 00:01:02,1", "2023-11-16 00:01,1,1", "2023-11-16 0:0:0,99999999999,1"] {
            assert!(azure(wrong).is_err(), "{wrong}");
        }
        for wrong in [
            r#"{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [0]}"#,
            r#"{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": [0]}"#,
            "{}",
        ] {
            assert!(mooncake(wrong).is_err(), "{wrong}");
        }
    }
}
