//! Engine versions, parsed to the precision that dialects require.

use std::fmt;

/// The three leading numbers of a version; suffixes (`.post1`, `rc0`, `.dev3+gabc`) do not change a dialect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    major: u32,
    minor: u32,
    patch: u32,
}

impl Version {
    /// `major.minor.patch`
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self { major, minor, patch }
    }

    /// The three numbers.
    pub const fn numbers(self) -> [u32; 3] {
        [self.major, self.minor, self.patch]
    }

    /// Parses `0.5.23`, `v0.5.10.post2`, `0.5.10rc0`; Returns `None` for anything else, and for builds that report
    /// `0.0.0` because they do not know their version.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim().trim_start_matches('v').splitn(3, '.');
        let major = parts.next()?.parse().ok()?;
        let minor = parts.next()?.parse().ok()?;
        let patch = parts.next()?;
        let digits = patch.find(|c: char| !c.is_ascii_digit()).unwrap_or(patch.len());
        let version = Self { major, minor, patch: patch[..digits].parse().ok()? };
        (version != Self::new(0, 0, 0)).then_some(version)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_ordered() {
        for (text, version) in [
            ("0.5.23", Some(Version::new(0, 5, 23))),
            (" v0.5.10.post2", Some(Version::new(0, 5, 10))),
            ("0.5.10rc0", Some(Version::new(0, 5, 10))),
            ("0.5.9.dev3+gabc", Some(Version::new(0, 5, 9))),
            ("0.0.0.dev1", None),
            ("main", None),
            ("0.5", None),
            ("0.5.x", None),
            ("", None),
            ("99999999999.1.1", None),
        ] {
            assert_eq!(Version::parse(text), version, "{text}");
        }
        assert!(Version::new(0, 5, 9) < Version::new(0, 5, 10) && Version::new(0, 5, 23) < Version::new(0, 6, 0));
        assert_eq!(Version::new(0, 5, 9).to_string(), "0.5.9");
    }
}
