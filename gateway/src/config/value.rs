//! Validates single values: numbers, times, names, digests.

use std::collections::HashSet;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::time::Duration;

use super::{ConfigError, Result};

/// One day: longer waits are mistakes, and much longer ones overflow timers.
pub(super) const MAX_SECONDS: f64 = 86_400.0;

pub(super) fn seconds(key: &str, value: f64) -> Result<Duration> {
    within(key, value, 0.001..=MAX_SECONDS).map(Duration::from_secs_f64)
}

/// Checks that a number is within a range; NaN is in none.
pub(super) fn within<N: PartialOrd + Display>(key: &str, value: N, range: RangeInclusive<N>) -> Result<N> {
    if range.contains(&value) {
        return Ok(value);
    }
    Err(ConfigError::value(key, format!("{value}, expected {} to {}", range.start(), range.end())))
}

pub(super) fn share(key: &str, value: f64) -> Result<f64> {
    within(key, value, 0.0..=1.0)
}

pub(super) fn at_least<N: PartialOrd + Display>(key: &str, value: N, least: N) -> Result<N> {
    if value >= least {
        return Ok(value);
    }
    Err(ConfigError::value(key, format!("{value}, expected at least {least}")))
}

pub(super) fn any<T>(_: &str, value: T) -> Result<T> {
    Ok(value)
}

pub(super) fn positive<N: PartialOrd + Display + From<u8>>(key: &str, value: N) -> Result<N> {
    at_least(key, value, N::from(1))
}

/// The SHA-256 digest of a secret; debug output hides it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SecretDigest(pub(crate) [u8; 32]);

impl std::fmt::Debug for SecretDigest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("(set)")
    }
}

/// Parses a SHA-256 digest. Errors do not repeat the text, which may be a secret entered by mistake.
pub(super) fn digest(key: &str, hex: &str) -> Result<SecretDigest> {
    let wrong = || ConfigError::value(key, "not 64 hexadecimal digits");
    if hex.len() != 64 || !hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(wrong());
    }
    let mut digest = [0; 32];
    for (byte, at) in digest.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(&hex[at..at + 2], 16).map_err(|_| wrong())?;
    }
    Ok(SecretDigest(digest))
}

pub(super) fn printable(key: &str, name: &str) -> Result<()> {
    if name.is_empty() || name.len() > 256 || name.chars().any(char::is_control) {
        return Err(ConfigError::value(key, format!("{name:?} is not a name of 1 to 256 printable characters")));
    }
    Ok(())
}

pub(super) fn unique(key: &str, name: &str, taken: &mut HashSet<String>) -> Result<()> {
    printable(key, name)?;
    if !taken.insert(name.to_owned()) {
        return Err(ConfigError::value(key, format!("'{name}' is already taken")));
    }
    Ok(())
}
