//! The one registry of policies.

use crate::affinity::Affinity;
use crate::affinity_paper::AffinityPaper;
use crate::load_only::{LeastLoad, PowerOfTwo, Random};
use crate::policy::Policy;
use crate::round_robin::RoundRobin;
use crate::settings::Settings;

/// Makes a policy with the given settings.
type Make = fn(&Settings) -> Box<dyn Policy>;

/// Every policy: its name and how it is made. A new policy is one line here.
const POLICIES: [(&str, Make); 6] = [
    ("affinity", |settings| Box::new(Affinity::new(settings))),
    ("affinity_paper", |_| Box::new(AffinityPaper)),
    ("round_robin", |_| Box::new(RoundRobin)),
    ("random", |_| Box::new(Random)),
    ("power_of_two", |_| Box::new(PowerOfTwo)),
    ("least_load", |_| Box::new(LeastLoad)),
];

/// The names that [`policy`] and [`policy_with`] know, the default one first.
pub const NAMES: [&str; POLICIES.len()] = {
    let mut names = [""; POLICIES.len()];
    let mut index = 0;
    while index < names.len() {
        names[index] = POLICIES[index].0;
        index += 1;
    }
    names
};

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
    let (_, make) =
        POLICIES.iter().find(|(known, _)| *known == name).ok_or_else(|| UnknownPolicy { name: name.to_owned() })?;
    Ok(make(settings))
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
        assert_eq!(
            error.to_string(),
            "unknown policy `Affinity`, expected one of: affinity, affinity_paper, round_robin, random, power_of_two, least_load"
        );
    }
}
