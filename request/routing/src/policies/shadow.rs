//! `shadow`: routes by another policy, and shows the caller what `affinity` would have done.
//!
//! [`Settings::baseline`] names the policy that routes, and requests carry its name ([`Policy::acting_name`]).
//! [`Comparison`](crate::Comparison) accumulates the differences, not this policy: choosing changes nothing.

use super::{Affinity, PolicyError, policy_with};
use crate::policy::{Choice, Needs, Policy, RankLoad, Request};
use crate::settings::Settings;

/// Its own name, which cannot be its baseline.
const NAME: &str = "shadow";

/// The policy; see the module documentation.
pub(super) struct Shadow {
    acting: Box<dyn Policy>,
    watched: Affinity,
}

impl Shadow {
    /// Routes by the baseline in these settings.
    ///
    /// # Errors
    /// [`PolicyError`] if there is no such policy, or it is `shadow` itself.
    pub(super) fn new(settings: &Settings) -> Result<Self, PolicyError> {
        if settings.baseline == NAME {
            return Err(PolicyError::ShadowOfItself);
        }
        Ok(Shadow { acting: policy_with(&settings.baseline, settings)?, watched: Affinity::new(settings) })
    }
}

impl Policy for Shadow {
    fn name(&self) -> &'static str {
        NAME
    }

    fn needs(&self) -> Needs {
        let Needs { share, cached, .. } = self.watched.needs();
        Needs { share, cached, key: self.acting.needs().key }
    }

    fn choose(&self, request: &Request<'_>, loads: &[RankLoad], sequence: u64) -> Option<Choice> {
        self.acting.choose(request, loads, sequence)
    }

    fn acting_name(&self) -> &'static str {
        self.acting.name()
    }

    fn watched(&self) -> Option<&dyn Policy> {
        Some(&self.watched)
    }
}
