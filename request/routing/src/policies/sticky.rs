//! `sticky`: routes requests with equal keys to the same rank, unless that rank is overloaded.
//!
//! Uses rendezvous hashing: each pair of rank and key hashes to a number, and the available rank with the highest
//! number owns the key. When a rank becomes unavailable, only its own keys move, and they move back when it returns. If
//! a rank exceeds the cap on in-flight sequences, its requests go to the key's next rank; recent tokens are ignored.
//! Requests without a key are routed by `least_load`.

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
        // Keep only the upper 53 bits, which an f64 represents exactly.
        let cost = |index: usize, _: &RankLoad| -((scramble(key ^ scramble(index as u64)) >> 11) as f64);
        let limits = self.0.limits(loads, request);
        let (index, capped) = cheapest(loads, sequence, |_, load| limits.is_idle_enough(load), cost)?;
        Choice::at(index, request, capped)
    }
}
