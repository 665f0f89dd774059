//! The one registry of policies.

use crate::affinity::Affinity;
use crate::policy::Policy;
use crate::round_robin::RoundRobin;
use crate::settings::Settings;

/// The names that [`policy`] and [`policy_with`] know, the default one first.
pub const NAMES: [&str; 2] = ["affinity", "round_robin"];

/// A policy name that is not in the registry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown policy `{name}`, expected one of: {}", NAMES.join(", "))]
pub struct UnknownPolicy {
    /// The name as given.
    pub name: String,
}

/// The policy of that name with the default settings.
pub fn policy(name: &str) -> Result<Box<dyn Policy>, UnknownPolicy> {
    policy_with(name, &Settings::default())
}

/// The policy of that name with the given settings.
pub fn policy_with(name: &str, settings: &Settings) -> Result<Box<dyn Policy>, UnknownPolicy> {
    match name {
        "affinity" => Ok(Box::new(Affinity::new(settings))),
        "round_robin" => Ok(Box::new(RoundRobin)),
        _ => Err(UnknownPolicy { name: name.to_owned() }),
    }
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
        assert_eq!(error.to_string(), "unknown policy `Affinity`, expected one of: affinity, round_robin");
    }
}
