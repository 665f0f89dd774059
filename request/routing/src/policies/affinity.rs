//! `affinity`: the cheapest rank by the one [`cost`](crate::cost), under its hard load cap.
//!
//! With nothing pending, nothing cached and `a` alike this is the greatest share less price and backlog. A request
//! without evidence, that is without shares that differ between ranks, is placed by backlog and cached tokens alone.
//!
//! The paper's Algorithm 2 instead masks each device until all the others had a request. That keeps counts even but
//! forces most requests away from their experts, and ignores that requests differ in length.

use crate::cost::{Weighing, evidence};
use crate::policy::{Choice, Needs, Policy, RankLoad, Request};
use crate::settings::Settings;

/// The policy; see the module's text.
#[derive(Clone, Copy, Debug)]
pub struct Affinity {
    weighing: Weighing,
}

impl Affinity {
    /// The policy with these settings.
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
