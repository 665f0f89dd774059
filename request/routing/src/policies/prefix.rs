//! `prefix`: chooses the rank with the lowest combined cost of backlog and uncached prompt tokens.
//!
//! Uses the [`cost`](crate::cost) of `affinity` without the communication term, within the same load caps: the best
//! possible for a gateway that knows prompts and caches, but not which experts a prompt activates.

use crate::cost::Weighing;
use crate::policy::{Choice, Needs, Policy, RankLoad, Request};

/// The policy; see the module documentation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prefix(pub(super) Weighing);

impl Policy for Prefix {
    fn name(&self) -> &'static str {
        "prefix"
    }

    fn needs(&self) -> Needs {
        Needs { cached: true, ..Needs::default() }
    }

    fn choose(&self, request: &Request<'_>, loads: &[RankLoad], sequence: u64) -> Option<Choice> {
        self.0.choose(request, None, loads, sequence)
    }
}
