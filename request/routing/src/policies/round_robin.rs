//! `round_robin`: rotates strictly through the available ranks, regardless of the prompt.

use crate::policy::{Choice, Policy, RankLoad, Request, available};

/// Request `i` goes to the `i mod n`-th of the `n` available ranks. `i` is the caller's sequence number, so the policy
/// itself is stateless.
#[derive(Clone, Copy, Debug, Default)]
pub struct RoundRobin;

impl Policy for RoundRobin {
    fn name(&self) -> &'static str {
        "round_robin"
    }

    fn choose(&self, request: &Request<'_>, loads: &[RankLoad], sequence: u64) -> Option<Choice> {
        let position = sequence.checked_rem(available(loads).count() as u64)?;
        let (index, _) = available(loads).nth(position as usize)?;
        Choice::at(index, request, false)
    }
}
