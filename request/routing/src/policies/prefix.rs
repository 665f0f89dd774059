//! `prefix`: the rank with the least backlog and the fewest prompt tokens still to be computed.
//!
//! The [`cost`](crate::cost) of `affinity` without its communication, under the same load cap: the best possible for a
//! gateway that knows prompts and caches, but not which experts a prompt needs.

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
