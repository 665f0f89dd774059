//! Chooses the ranks that a round of probes targets.

use semmoe_tables::RankId;

/// Maximum ranks probed in one round.
const RANKS_PER_ROUND: u64 = 8;
/// Minimum number of probes in a round, if ranks are few.
const LEAST_PROBES: u32 = 4;

/// Returns the number of rounds needed to cover the larger half of all ranks.
fn pages(ranks: u16) -> u64 {
    u64::from(ranks).div_ceil(2).div_ceil(RANKS_PER_ROUND).max(1)
}

/// One round: the number of probes for each rank.
///
/// A round probes only the ranks whose number has a certain bit set, or only those with it clear, so a probe that
/// strays to the other half shows in per-rank totals, whatever the other probes do. Over all bits, any two ranks are
/// distinguished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbePlan {
    /// Probes for each rank.
    pub per_rank: Vec<u32>,
}

impl ProbePlan {
    /// Returns the round with this number for an engine with `ranks` ranks: 4 to 8 probes. Successive rounds first
    /// cover all ranks and then divide them by other bits.
    pub fn round(number: u64, ranks: u16) -> Self {
        let mut per_rank = vec![0; usize::from(ranks)];
        let bits = u64::from(u16::BITS - ranks.saturating_sub(1).leading_zeros()).max(1);
        let (half, page) = (number % 2, number / 2 % pages(ranks));
        let bit = number / 2 / pages(ranks) % bits;
        let halves = (0..ranks).filter(|rank| u64::from(*rank) >> bit & 1 == half);
        let probed: Vec<u16> = halves.skip((page * RANKS_PER_ROUND) as usize).take(RANKS_PER_ROUND as usize).collect();
        for rank in &probed {
            per_rank[usize::from(*rank)] = (LEAST_PROBES / probed.len() as u32).max(1);
        }
        Self { per_rank }
    }

    /// Returns the number of rounds needed to probe every rank.
    pub fn rounds_for_all(ranks: u16) -> u64 {
        2 * pages(ranks)
    }

    /// Iterates over the rank of every probe.
    pub fn ranks(&self) -> impl Iterator<Item = RankId> {
        let repeat = |(rank, count): (u16, &u32)| std::iter::repeat_n(RankId::new(rank), *count as usize);
        (0..).zip(&self.per_rank).flat_map(repeat)
    }

    /// Returns the number of probes in the round.
    pub fn probes(&self) -> u64 {
        self.per_rank.iter().map(|count| u64::from(*count)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_reach_every_rank() {
        for ranks in [1_u16, 2, 3, 4, 7, 8, 9, 16, 17, 64, 129] {
            let mut seen = vec![0; usize::from(ranks)];
            for number in 0..ProbePlan::rounds_for_all(ranks) {
                let plan = ProbePlan::round(number, ranks);
                assert_eq!(plan.ranks().count() as u64, plan.probes());
                assert!(plan.probes() <= 8, "{ranks} ranks: {plan:?}");
                for (seen, count) in seen.iter_mut().zip(&plan.per_rank) {
                    *seen += count;
                }
            }
            assert!(seen.iter().all(|count| *count > 0), "{ranks} ranks: {seen:?}");
        }
    }

    /// An engine that swaps two ranks cannot pass: some round probes just one of them.
    #[test]
    fn any_two_ranks_are_distinguished() {
        for ranks in [2_u16, 3, 4, 8, 13, 16] {
            let plans: Vec<_> = (0..8).map(|number| ProbePlan::round(number, ranks)).collect();
            for (one, other) in (0..usize::from(ranks)).flat_map(|one| (0..one).map(move |other| (one, other))) {
                let apart = plans.iter().any(|plan| plan.per_rank[one] != plan.per_rank[other]);
                assert!(apart, "{ranks} ranks: {one} and {other}");
            }
        }
    }
}
