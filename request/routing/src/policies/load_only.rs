//! Policies that use only load or randomness: `random`, `power_of_two`, `least_load`.
//!
//! They serve as baselines and need no tables. Randomness is a hash of the sequence number, so choices are
//! reproducible.

use crate::hash::scramble;
use crate::policy::{Choice, Policy, RankLoad, Request, available, turn};

/// `random`: every available rank is equally likely.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Random;

/// `power_of_two`: draws two random ranks and chooses the one with fewer tokens in flight.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PowerOfTwo;

/// `least_load`: chooses the rank with the fewest tokens in flight; ties are broken by rotation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LeastLoad;

/// Returns the index of the `position`-th available rank.
fn available_at(loads: &[RankLoad], position: u64) -> Option<usize> {
    Some(available(loads).nth(usize::try_from(position).ok()?)?.0)
}

fn count_available(loads: &[RankLoad]) -> u64 {
    loads.iter().filter(|load| load.available).count() as u64
}

impl Policy for Random {
    fn name(&self) -> &'static str {
        "random"
    }

    fn choose(&self, request: &Request<'_>, loads: &[RankLoad], sequence: u64) -> Option<Choice> {
        let position = scramble(sequence).checked_rem(count_available(loads))?;
        Choice::at(available_at(loads, position)?, request, false)
    }
}

impl Policy for PowerOfTwo {
    fn name(&self) -> &'static str {
        "power_of_two"
    }

    fn choose(&self, request: &Request<'_>, loads: &[RankLoad], sequence: u64) -> Option<Choice> {
        let ranks = count_available(loads);
        let chance = scramble(sequence);
        let first = (chance >> 32).checked_rem(ranks)?;
        // The second one differs from the first if there is more than one rank.
        let second = (first + 1 + (chance & 0xffff_ffff) % (ranks - 1).max(1)) % ranks;
        let (first, second) = (available_at(loads, first)?, available_at(loads, second)?);
        let busy = |index: usize| loads[index].in_flight_tokens;
        Choice::at(if busy(second) < busy(first) { second } else { first }, request, false)
    }
}

impl Policy for LeastLoad {
    fn name(&self) -> &'static str {
        "least_load"
    }

    fn choose(&self, request: &Request<'_>, loads: &[RankLoad], sequence: u64) -> Option<Choice> {
        let turn = turn(loads.len(), sequence);
        let (index, _) = available(loads).min_by_key(|(index, load)| (load.in_flight_tokens, turn(*index)))?;
        Choice::at(index, request, false)
    }
}
