//! `prefix`: the rank with the least backlog and the fewest tokens of the prompt still to be computed.
//!
//! The [`cost`](crate::cost) of `affinity` without its communication, under the same load cap: what a gateway can do that
//! knows prompts and caches, but not which experts a prompt needs.

use crate::cost::{Cap, Cost, cheapest};
use crate::policy::{Choice, Needs, Policy, RankLoad, Request};
use crate::settings::Settings;

/// The policy; see the module's text.
#[derive(Clone, Copy, Debug)]
pub struct Prefix {
    cost: Cost,
    cap: Cap,
}

impl Prefix {
    /// The policy with these settings.
    pub fn new(settings: &Settings) -> Self {
        Prefix { cost: Cost::new(settings), cap: Cap::new(settings) }
    }
}

impl Policy for Prefix {
    fn name(&self) -> &'static str {
        "prefix"
    }

    fn needs(&self) -> Needs {
        Needs { cached: true, ..Needs::default() }
    }

    fn choose(&self, request: &Request<'_>, loads: &[RankLoad], sequence: u64) -> Option<Choice> {
        let costs = self.cost.of(request, None, loads);
        let most = self.cap.most(loads, request.tokens);
        let (index, capped) = cheapest(loads, sequence, most, |index, _| costs.on(index).total())?;
        Choice::at(index, request, capped)
    }
}
