//! `sticky`: requests with equal keys go to the same rank, unless it is too busy.
//!
//! Rendezvous hashing: every rank has a number for every key, and the available rank with the highest one owns the key.
//! A rank that goes away moves only its own keys, and gets them back when it returns. A rank above the cap on sequences
//! in flight passes its requests on to the key's next rank; recent tokens do not count. A request without a key is
//! placed by `least_load`.

use super::load_only::LeastLoad;
use crate::cost::{Cap, cheapest};
use crate::hash::scramble;
use crate::policy::{Choice, Needs, Policy, RankLoad, Request};

/// The policy; see the module documentation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sticky(pub(super) Cap);

impl Policy for Sticky {
    fn name(&self) -> &'static str {
        "sticky"
    }

    fn needs(&self) -> Needs {
        Needs { key: true, ..Needs::default() }
    }

    fn choose(&self, request: &Request<'_>, loads: &[RankLoad], sequence: u64) -> Option<Choice> {
        let Some(key) = request.key else { return LeastLoad.choose(request, loads, sequence) };
        // Only the upper bits, as a float holds 53.
        let cost = |index: usize, _: &RankLoad| -((scramble(key ^ scramble(index as u64)) >> 11) as f64);
        let limits = self.0.limits(loads, request);
        let (index, capped) = cheapest(loads, sequence, |_, load| limits.is_idle_enough(load), cost)?;
        Choice::at(index, request, capped)
    }
}
