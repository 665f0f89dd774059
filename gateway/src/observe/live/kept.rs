//! Per-model entries, and the time.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::{SystemTime, UNIX_EPOCH};

/// Returns a model's entry, created if absent.
pub(super) fn found_or<'a, T, E>(
    all: &'a mut BTreeMap<String, T>,
    model: &str,
    make: impl FnOnce() -> Result<T, E>,
) -> Result<&'a mut T, E> {
    match all.entry(model.to_owned()) {
        Entry::Occupied(found) => Ok(found.into_mut()),
        Entry::Vacant(place) => Ok(place.insert(make()?)),
    }
}

pub(super) fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Returns the Unix time in seconds.
pub(crate) fn now() -> u64 {
    unix_seconds(SystemTime::now())
}

pub(super) fn rfc3339(seconds: u64) -> String {
    let time = UNIX_EPOCH + std::time::Duration::from_secs(seconds);
    humantime::format_rfc3339_seconds(time).to_string()
}
