//! Domains: weights inputs so that each kind of text counts equally, no matter how much of it was recorded.
//!
//! Counts stay integers: each domain's counts are multiplied by one integer. The multipliers are the smallest for which
//! the domains' weighted token counts are within [`TOLERANCE`] of each other, to inflate counts no more than necessary.
//! Multiplication does not commute with adding up domains, so it comes last: shards of one domain are added first.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Serialize;

use crate::ProfilerError;
use crate::error::check;

/// Maximum relative shortfall of a domain's weight against the largest weight.
const TOLERANCE: f64 = 0.05;
/// This many steps always meet the tolerance, because rounding errs by at most half a step.
const MAX_STEPS: u64 = 10;

/// A file and its domain. Written as `NAME=PATH`, or as `PATH` if the domain is the file name up to its first dot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainInput {
    /// The file.
    pub path: PathBuf,
    /// The explicit domain, if given.
    pub domain: Option<String>,
}

impl DomainInput {
    /// The explicit domain, or the file name up to its first dot.
    pub fn name(&self) -> String {
        let file = || self.path.file_name().unwrap_or(self.path.as_os_str()).to_string_lossy().into_owned();
        self.domain.clone().unwrap_or_else(|| file().split('.').next().unwrap_or_default().to_owned())
    }
}

impl From<PathBuf> for DomainInput {
    fn from(path: PathBuf) -> Self {
        DomainInput { path, domain: None }
    }
}

/// The text contains no path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected PATH or NAME=PATH")]
pub struct NoPath;

impl FromStr for DomainInput {
    type Err = NoPath;

    /// Text before the first `=` is a domain name if it contains only letters, digits, `-` and `_`; `./a=b` is a path.
    fn from_str(text: &str) -> Result<Self, NoPath> {
        let is_name =
            |name: &str| !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '-' || c == '_');
        let (domain, path) = match text.split_once('=') {
            Some((name, path)) if is_name(name) => (Some(name.to_owned()), path),
            _ => (None, text),
        };
        if path.is_empty() { Err(NoPath) } else { Ok(Self { path: path.into(), domain }) }
    }
}

impl fmt::Display for DomainInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.domain {
            Some(domain) => write!(f, "{domain}={}", self.path.display()),
            None => self.path.display().fmt(f),
        }
    }
}

/// Report about one domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DomainReport {
    /// Name of the domain.
    pub domain: String,
    /// Number of tokens before weighting.
    pub tokens: u64,
    /// The factor that its counts are multiplied by.
    pub multiplier: u32,
}

/// Groups the inputs by domain, in alphabetical order.
pub(crate) fn by_domain(inputs: &[DomainInput]) -> BTreeMap<String, Vec<&Path>> {
    let mut domains: BTreeMap<String, Vec<&Path>> = BTreeMap::new();
    inputs.iter().for_each(|input| domains.entry(input.name()).or_default().push(&input.path));
    domains
}

/// Rejects explicit domain names if counts are not weighted by domain.
pub(crate) fn refuse_domains(inputs: &[DomainInput]) -> Result<(), ProfilerError> {
    const EXPECTED: &str = "a path, as nothing is weighted by domain (for a file with this name, write ./NAME=PATH)";
    inputs.iter().try_for_each(|input| check(input.domain.is_none(), "an input", input, EXPECTED))
}

/// Computes the multipliers for domains with these token counts.
pub(crate) fn weigh(domains: &BTreeMap<String, u64>) -> Result<Vec<DomainReport>, ProfilerError> {
    let most = domains.values().copied().max().unwrap_or(0);
    if let Some((domain, _)) = domains.iter().find(|(_, tokens)| **tokens == 0) {
        return Err(ProfilerError::EmptyDomain(domain.clone()));
    }
    let rounded = |steps: u64, tokens: u64| (steps as f64 * most as f64 / tokens as f64).round();
    let error = |steps: u64| {
        let off = |tokens: u64| (rounded(steps, tokens) * tokens as f64 / (steps as f64 * most as f64) - 1.0).abs();
        domains.values().map(|&tokens| off(tokens)).fold(0.0, f64::max)
    };
    let steps = (1..MAX_STEPS).find(|&steps| error(steps) <= TOLERANCE).unwrap_or(MAX_STEPS);
    let report = |(domain, &tokens): (&String, &u64)| {
        let multiplier = rounded(steps, tokens);
        if multiplier > f64::from(u32::MAX) {
            return Err(ProfilerError::EmptyDomain(domain.clone()));
        }
        Ok(DomainReport { domain: domain.clone(), tokens, multiplier: multiplier as u32 })
    };
    domains.iter().map(report).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn multipliers(tokens: &[u64]) -> Vec<u32> {
        let domains = tokens.iter().enumerate().map(|(i, &n)| (format!("{i:03}"), n)).collect();
        weigh(&domains).unwrap().iter().map(|domain| domain.multiplier).collect()
    }

    #[test]
    fn smallest_whole_numbers() {
        assert_eq!(multipliers(&[100]), [1]);
        assert_eq!(multipliers(&[100, 100]), [1, 1]);
        assert_eq!(multipliers(&[100, 97]), [1, 1]);
        assert_eq!(multipliers(&[100, 50, 10]), [1, 2, 10]);
        assert_eq!(multipliers(&[300, 200]), [2, 3]);
        assert!(weigh(&[("a".to_owned(), 5), ("b".to_owned(), 0)].into()).is_err());
        assert!(weigh(&[("a".to_owned(), 1 << 47), ("b".to_owned(), 1)].into()).is_err());
    }

    proptest! {
        #[test]
        fn domains_weigh_alike(tokens in proptest::collection::vec(1u64..1_000_000, 1..8)) {
            let weights: Vec<f64> =
                multipliers(&tokens).iter().zip(&tokens).map(|(&m, &n)| f64::from(m) * n as f64).collect();
            let (least, most) = weights.iter().fold((f64::MAX, 0.0f64), |(a, b), &w| (a.min(w), b.max(w)));
            prop_assert!(most / least <= (1.0 + TOLERANCE) / (1.0 - TOLERANCE) + 1e-9, "{tokens:?} {weights:?}");
        }
    }

    #[test]
    fn names_of_domains() {
        let parse = |text: &str| text.parse::<DomainInput>().unwrap();
        assert_eq!(parse("code=/a/b.c"), DomainInput { path: "/a/b.c".into(), domain: Some("code".into()) });
        assert_eq!(parse("/a/chat.trace.safetensors").name(), "chat");
        assert_eq!(parse("./a=b.c").path, PathBuf::from("./a=b.c"));
        assert_eq!(parse("./a=b.c").name(), "a=b");
        assert!("x=".parse::<DomainInput>().is_err() && "".parse::<DomainInput>().is_err());
    }
}
