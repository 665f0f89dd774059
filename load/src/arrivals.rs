//! Arrival files: recorded arrival times of requests.
//!
//! | file | each line | time |
//! |---|---|---|
//! | `.jsonl` (Mooncake's traces) | a JSON object | `timestamp`, milliseconds |
//! | `.csv` (Azure's and BurstGPT's traces) | comma-separated fields | the column named `timestamp` in the header, else the first one: seconds, or `2023-11-16 18:17:03.97` (UTC) |
//!
//! Only the times are used. They are sorted and made relative to the first one.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use serde::Deserialize;

use crate::LoadError;
use crate::error::ArrivalError;

/// Maximum line length in bytes. It is large because Mooncake's lines contain a number for every 512 tokens.
const MAX_LINE_BYTES: u64 = 1 << 20;
/// Maximum number of arrivals, each of which takes 16 bytes of memory.
const MAX_ARRIVALS: usize = 10_000_000;
/// Maximum timestamp, in the year 5138; a larger number must be a mistake.
const MAX_SECONDS: f64 = 1e11;

#[derive(Deserialize)]
struct JsonLine {
    timestamp: f64,
}

/// Reads the arrival times in `path`, sorted and relative to the first.
///
/// # Errors
/// A `LoadError` that names the file and the invalid line.
pub fn read_arrivals(path: &Path) -> Result<Arc<[Duration]>, LoadError> {
    let whole = |error: ArrivalError| LoadError::Arrivals { path: path.to_path_buf(), source: error.into() };
    let extension = path.extension().and_then(|extension| extension.to_str()).map(str::to_ascii_lowercase);
    let mut form = match extension.as_deref() {
        Some("jsonl") => Form::Json,
        Some("csv") => Form::Csv { column: None },
        _ => return Err(whole(ArrivalError::Format)),
    };
    let io = |source| LoadError::Read { path: path.to_path_buf(), source };
    let mut reader = BufReader::new(File::open(path).map_err(io)?);
    let mut times = Vec::new();
    let mut text = Vec::new();
    for line in 1.. {
        text.clear();
        let bad = |error: ArrivalError| LoadError::Arrival { path: path.to_path_buf(), line, source: error.into() };
        let read = reader.by_ref().take(MAX_LINE_BYTES + 1).read_until(b'\n', &mut text).map_err(io)?;
        if read as u64 > MAX_LINE_BYTES {
            return Err(bad(ArrivalError::TooLong(MAX_LINE_BYTES)));
        }
        if read == 0 {
            break;
        }
        let text = std::str::from_utf8(&text).map_err(|_| bad(ArrivalError::NotText))?.trim();
        if text.is_empty() {
            continue;
        }
        if times.len() == MAX_ARRIVALS {
            return Err(whole(ArrivalError::TooMany(MAX_ARRIVALS)));
        }
        times.extend(form.time(text).map_err(bad)?);
    }
    times.sort_unstable();
    let Some(&first) = times.first() else { return Err(whole(ArrivalError::None)) };
    Ok(times.into_iter().map(|time| time - first).collect())
}

enum Form {
    Json,
    /// The column, known after the first line.
    Csv {
        column: Option<usize>,
    },
}

impl Form {
    /// Parses a line's time; `None` for the header.
    fn time(&mut self, line: &str) -> Result<Option<Duration>, ArrivalError> {
        match self {
            Self::Json => {
                let line: JsonLine = serde_json::from_str(line)?;
                seconds(line.timestamp / 1e3).map(Some)
            }
            Self::Csv { column: Some(column) } => {
                let field = line.split(',').nth(*column).ok_or(ArrivalError::NoColumn(*column + 1))?;
                csv_time(field).map(Some)
            }
            Self::Csv { column } => {
                let named = line.split(',').position(|name| clean(name).eq_ignore_ascii_case("timestamp"));
                *column = Some(named.unwrap_or(0));
                let first = line.split(',').next().unwrap_or_default();
                if named.is_some() || clean(first).starts_with(|c: char| c.is_ascii_alphabetic()) {
                    return Ok(None);
                }
                csv_time(first).map(Some)
            }
        }
    }
}

fn clean(field: &str) -> &str {
    field.trim().trim_matches('"').trim()
}

fn csv_time(field: &str) -> Result<Duration, ArrivalError> {
    let field = clean(field);
    if let Ok(number) = field.parse::<f64>() {
        return seconds(number);
    }
    // Quote only enough of the field to identify it.
    let wrong = || ArrivalError::NoTime(field.chars().take(40).collect());
    let time = humantime::parse_rfc3339_weak(field).map_err(|_| wrong())?;
    time.duration_since(UNIX_EPOCH).map_err(|_| wrong())
}

fn seconds(value: f64) -> Result<Duration, ArrivalError> {
    // Seconds since 1970 are also valid, because only differences matter.
    if !(0.0..=MAX_SECONDS).contains(&value) {
        return Err(ArrivalError::Seconds { found: value, most: MAX_SECONDS });
    }
    Ok(Duration::from_secs_f64(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, text: &str) -> Result<Vec<u64>, LoadError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        let times = read_arrivals(&path)?;
        Ok(times.iter().map(|time| time.as_millis() as u64).collect())
    }

    #[test]
    fn times_of_all_forms() {
        let mooncake = "{\"timestamp\": 500, \"input_length\": 1}\n\n{\"timestamp\": 27.5e2, \"hash_ids\": [1, 2]}\n";
        let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.9799600,4,1\n2023-11-17 00:00:01.4799600,3,1\r\n";
        for (name, text, expected) in [
            ("a.jsonl", mooncake, vec![0, 2250]),
            ("a.csv", azure, vec![0, 1500]),
            ("a.csv", "Request,\"Timestamp\"\n1,10\n2,12.5\n", vec![0, 2500]),
            ("a.csv", "1700000000.25\n1700000000.75", vec![0, 500]),
            ("A.CSV", "seconds\n3\n1\n2\n", vec![0, 1000, 2000]),
        ] {
            assert_eq!(read(name, text).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn wrong_files_name_line_and_reason() {
        for (name, text, cause) in [
            ("a.jsonl", "{\"timestamp\": 0}\n{\"time\": 1}\n", "a.jsonl line 2: missing field `timestamp`"),
            ("a.jsonl", "\n{\"timestamp\": -1}\n", "line 2: the time is -0.001 s"),
            ("a.jsonl", "{\"timestamp\": \"0\"}", "line 1: invalid type"),
            ("a.jsonl", "{\"timestamp\": 1e999}", "line 1: number out of range"),
            ("a.csv", "t\n1\nx\n", "line 3: the time is 'x', expected seconds or"),
            ("a.csv", "t\nnan\n", "line 2: the time is NaN"),
            ("a.csv", "t\ninf\n", "line 2: the time is inf"),
            ("a.csv", "a,timestamp\n1,1\n2\n", "line 3: no column 2"),
            ("a.csv", "t\n2023-13-45 00:00:00\n", "line 2: the time is '2023-13-45 00:00:00'"),
            ("a.csv", "t\n", "a.csv has no arrivals"),
            ("a.jsonl", "", "a.jsonl has no arrivals"),
            ("a.txt", "1", "is neither .jsonl"),
        ] {
            let error = read(name, text).unwrap_err().to_string();
            assert!(error.contains(cause), "{text}: {error}");
        }
        let long = format!("{{\"timestamp\": 0, \"x\": \"{}\"}}", "x".repeat(2 << 20));
        assert!(read("a.jsonl", &long).unwrap_err().to_string().contains("line 1: longer than"));
        assert!(read_arrivals(Path::new("/nowhere/a.csv")).is_err());
    }
}
