//! `shadow`: routes by another policy, and reports to the caller what `affinity` would have chosen.
//!
//! [`Settings::baseline`] names the policy that routes, and requests are labelled with that name
//! ([`Policy::acting_name`]). Choosing has no side effects; [`Comparison`](crate::Comparison) accumulates the
//! differences.

use super::{Affinity, PolicyError, policy_with};
use crate::policy::{Choice, Needs, Policy, RankLoad, Request};
use crate::settings::Settings;

/// The name of this policy, which cannot be its own baseline.
const NAME: &str = "shadow";

/// The policy; see the module documentation.
pub(super) struct Shadow {
    acting: Box<dyn Policy>,
    watched: Affinity,
}

impl Shadow {
    /// Builds the policy with the baseline named in these settings.
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
