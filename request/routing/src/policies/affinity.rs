//! `affinity`: chooses the rank with the lowest [`cost`](crate::cost) within the hard load caps.
//!
//! With nothing pending or cached and requests of equal length, this rank is the one with the largest share minus price
//! and backlog. A request without evidence, i.e. without shares that differ between ranks, is routed by backlog, cached
//! tokens and sequences only.
//!
//! The paper's Algorithm 2 instead masks each device until all others have received a request. That keeps counts even,
//! but it routes most requests away from their experts and ignores differences in request length.

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
