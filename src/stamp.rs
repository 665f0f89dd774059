//! The time stamp of written files: the only place where the clock affects content.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The current time in RFC 3339, in full seconds, UTC; `SOURCE_DATE_EPOCH` replaces the clock for reproducible files.
pub(crate) fn created() -> String {
    let fixed =
        std::env::var("SOURCE_DATE_EPOCH").ok().and_then(|seconds| seconds.parse().ok()).map(Duration::from_secs);
    let time = fixed.map_or_else(SystemTime::now, |since| UNIX_EPOCH + since);
    humantime::format_rfc3339_seconds(time).to_string()
}
