//! `affinity`: the cheapest rank by the one [`cost`](crate::cost), under its hard load cap.
//!
//! With nothing pending, nothing cached and `a` alike this is the greatest share less price and backlog. A request without
//! evidence, that is without shares that tell ranks apart, is placed by backlog and cached tokens alone.
//!
//! The paper's Algorithm 2 instead masks each device until all the others had a request. That keeps counts even but
//! forces most requests away from their experts, and ignores that requests differ in length.

use crate::cost::{Cap, Cost, cheapest, evidence};
use crate::policy::{Choice, Needs, Policy, RankLoad, Request};
use crate::settings::Settings;

/// The policy; see the module's text.
#[derive(Clone, Copy, Debug)]
pub struct Affinity {
    cost: Cost,
    cap: Cap,
}

impl Affinity {
    /// The policy with these settings.
    pub fn new(settings: &Settings) -> Self {
        Affinity { cost: Cost::new(settings), cap: Cap::new(settings) }
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
        let share = evidence(request, loads);
        let costs = self.cost.of(request, share, loads);
        let most = self.cap.most(loads, request.tokens);
        let (index, capped) = cheapest(loads, sequence, most, |index, _| costs.on(index).total())?;
        Choice::at(index, request, capped)
    }
}
