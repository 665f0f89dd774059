//! The policies that place a model's requests: names, baseline and canary.

use semmoe_routing::{Canary, Policy, policy_with};

use super::{ConfigError, PolicyConfig, RawModel, Result, RoutingConfig};

/// Validates a model's policy configuration.
pub(super) fn policies(key: &str, raw: &RawModel, routing: &RoutingConfig) -> Result<PolicyConfig> {
    let mut settings = routing.settings.clone();
    if let Some(baseline) = &raw.baseline {
        settings.baseline.clone_from(baseline);
    }
    let make = |field: &str, name: &str| {
        policy_with(name, &settings).map_err(|error| ConfigError::value(format!("{key}.{field}"), error))
    };
    let policy = make("policy", &raw.policy)?;
    let canary = raw.canary.map(|percent| canary(key, percent, policy.as_ref(), &settings.baseline)).transpose()?;
    let mut needs = policy.needs();
    if canary.is_some() {
        let baseline = make("baseline", &settings.baseline)?;
        needs.key |= baseline.needs().key;
        needs.cached |= baseline.needs().cached;
        needs.share |= baseline.needs().share;
    } else if let Some(baseline) = raw.baseline.as_ref().filter(|_| policy.watched().is_none()) {
        let cause = format!("'{baseline}' would never be used; a baseline requires policy 'shadow' or `canary`");
        return Err(ConfigError::value(format!("{key}.baseline"), cause));
    }
    Ok(PolicyConfig { name: raw.policy.clone(), settings, canary, needs })
}

fn canary(key: &str, percent: u64, policy: &dyn Policy, baseline: &str) -> Result<Canary> {
    let wrong = |cause: String| ConfigError::value(format!("{key}.canary"), cause);
    if policy.watched().is_some() {
        return Err(wrong(format!("policy '{}' places no requests itself; set the policy to test", policy.name())));
    }
    if policy.name() == baseline {
        return Err(wrong(format!("policy and baseline are both '{baseline}'")));
    }
    let of = |percent| Canary::new(u8::try_from(percent).ok()?);
    of(percent).ok_or_else(|| wrong(format!("{percent}, expected 0 to 100 percent")))
}
