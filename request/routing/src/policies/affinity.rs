//! `affinity`: the rank with the lowest [`cost`](crate::cost), under its hard load cap.
//!
//! With nothing pending, nothing cached and equal `a`, this is the largest share minus price and backlog. A request
//! without evidence, i.e. without shares that differ between ranks, is placed by backlog and cached tokens alone.
//!
//! The paper's Algorithm 2 instead masks each device until all others have had a request. That keeps counts even but
//! forces most requests away from their experts, and ignores that requests differ in length.

use crate::cost::{Weighing, evidence};
use crate::policy::{Choice, Needs, Policy, RankLoad, Request};
use crate::settings::Settings;

/// The policy; see the module documentation.
#[derive(Clone, Copy, Debug)]
pub struct Affinity {
    weighing: Weighing,
}

impl Affinity {
    /// Builds the policy from these settings.
    pub fn new(settings: &Settings) -> Self {
        Affinity { weighing: Weighing::new(settings) }
    }
}

impl Policy for Affinity {
    fn name(&self) -> &'static str {
        "affinity"
    }

    fn needs(&self) -> Needs {
        Needs { share: true, cached: true, ..Needs::default() }
    }

    fn choose(&self, request: &Request<'_>, loads: &[RankLoad], sequence: u64) -> Option<Choice> {
        self.weighing.choose(request, evidence(request, loads), loads, sequence)
    }
}
