//! `shadow`: routes by another policy, and lets the caller see what `affinity` would have done.
//!
//! Which policy routes is [`Settings::baseline`]. The requests carry its name ([`Policy::acting_name`]); what is
//! accumulated about the two is in [`Comparison`](crate::Comparison), not here: choosing changes nothing.

use super::{Affinity, PolicyError, policy_with};
use crate::policy::{Choice, Needs, Policy, RankLoad, Request};
use crate::settings::Settings;

/// Its own name, which it must not shadow.
const NAME: &str = "shadow";

/// The policy; see the module's text.
pub(super) struct Shadow {
    acting: Box<dyn Policy>,
    watched: Affinity,
}

impl Shadow {
    /// Routes by the baseline of these settings.
    ///
    /// # Errors
    /// [`PolicyError`]: there is no such policy, or it is `shadow` itself.
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
