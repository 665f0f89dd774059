//! The timestamp in output files: the only place where the clock affects their content.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Returns the current UTC time in RFC 3339 format, in whole seconds. `SOURCE_DATE_EPOCH` overrides the clock for
/// reproducible files.
pub(crate) fn created() -> String {
    let fixed =
        std::env::var("SOURCE_DATE_EPOCH").ok().and_then(|seconds| seconds.parse().ok()).map(Duration::from_secs);
    let time = fixed.map_or_else(SystemTime::now, |since| UNIX_EPOCH + since);
    humantime::format_rfc3339_seconds(time).to_string()
}
