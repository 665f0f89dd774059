//! The policy registry. A new policy needs a file in this folder, a `mod` line below and an entry in `POLICIES`.

pub mod affinity;
mod affinity_paper;
mod load_only;
mod prefix;
mod round_robin;
mod shadow;
mod sticky;

use crate::cost::{Cap, Weighing};
use crate::policy::Policy;
use crate::settings::Settings;

pub use affinity::Affinity;
pub use round_robin::RoundRobin;

/// Builds a policy from the given settings.
type Make = fn(&Settings) -> Result<Box<dyn Policy>, PolicyError>;

/// Name and constructor of every policy.
const POLICIES: &[(&str, Make)] = &[
    ("affinity", |settings| Ok(Box::new(Affinity::new(settings)))),
    ("affinity_paper", |_| Ok(Box::new(affinity_paper::AffinityPaper))),
    ("round_robin", |_| Ok(Box::new(RoundRobin))),
    ("random", |_| Ok(Box::new(load_only::Random))),
    ("power_of_two", |_| Ok(Box::new(load_only::PowerOfTwo))),
    ("least_load", |_| Ok(Box::new(load_only::LeastLoad))),
    ("prefix", |settings| Ok(Box::new(prefix::Prefix(Weighing::new(settings))))),
    ("sticky", |settings| Ok(Box::new(sticky::Sticky(Cap::new(settings))))),
    ("shadow", |settings| Ok(Box::new(shadow::Shadow::new(settings)?))),
];

/// The names accepted by [`policy`] and [`policy_with`], with the default first.
pub const NAMES: [&str; POLICIES.len()] = {
    let mut names = [""; POLICIES.len()];
    let mut index = 0;
    while index < names.len() {
        names[index] = POLICIES[index].0;
        index += 1;
    }
    names
};

/// An error while building a policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// The policy is not in the registry.
    #[error("unknown policy `{name}`, expected one of: {}", NAMES.join(", "))]
    Unknown {
        /// The name as given.
        name: String,
    },
    /// `shadow` needs another policy as its baseline.
    #[error("policy `shadow` cannot be its own `baseline`")]
    ShadowOfItself,
}

/// Returns the named policy with default settings.
///
/// # Errors
/// [`PolicyError`] if there is no such policy.
pub fn policy(name: &str) -> Result<Box<dyn Policy>, PolicyError> {
    policy_with(name, &Settings::default())
}

/// Returns the named policy with the given settings.
///
/// # Errors
/// [`PolicyError`] if the policy or its baseline does not exist, or if `shadow` is its own baseline.
pub fn policy_with(name: &str, settings: &Settings) -> Result<Box<dyn Policy>, PolicyError> {
    let known = POLICIES.iter().find(|(known, _)| *known == name);
    let (_, make) = known.ok_or_else(|| PolicyError::Unknown { name: name.to_owned() })?;
    make(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_listed_name_resolves_to_itself() {
        for name in NAMES {
            assert_eq!(policy(name).unwrap().name(), name);
        }
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let error = policy("Affinity").err().unwrap();
        let text = error.to_string();
        assert!(text.starts_with("unknown policy `Affinity`, expected one of: affinity, affinity_paper, "), "{text}");
        assert!(NAMES.iter().all(|name| text.contains(name)), "{text}");
        let settings = |baseline: &str| Settings { baseline: baseline.to_owned(), ..Settings::default() };
        let error = |baseline| policy_with("shadow", &settings(baseline)).err().unwrap();
        assert_eq!(error("shadow"), PolicyError::ShadowOfItself);
        assert_eq!(error("x"), PolicyError::Unknown { name: "x".to_owned() });
        assert_eq!(policy_with("shadow", &settings("random")).unwrap().acting_name(), "random");
    }
}
