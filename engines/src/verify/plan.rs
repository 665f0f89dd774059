//! Which ranks a round of probes goes to.

use semmoe_tables::RankId;

/// Ranks that one round probes at most.
const RANKS_PER_ROUND: u16 = 8;

/// One round: how many probes each rank gets.
///
/// Neighbouring ranks get different numbers, so that an engine which swaps or shifts ranks cannot pass: totals per rank
/// tell where probes ran even where single answers do not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbePlan {
    /// Probes for each rank.
    pub per_rank: Vec<u32>,
}

impl ProbePlan {
    /// The round with this number, for an engine of `ranks` ranks. Up to 8 ranks get 1, 2 or 3 probes each; following rounds
    /// go through all ranks, and through other numbers.
    pub fn round(number: u64, ranks: u16) -> Self {
        let mut per_rank = vec![0; usize::from(ranks)];
        let probed = u64::from(ranks.min(RANKS_PER_ROUND));
        for at in 0..probed {
            let rank = (number * probed + at) % u64::from(ranks.max(1));
            per_rank[rank as usize] = 1 + ((at + number) % 3) as u32;
        }
        Self { per_rank }
    }

    /// Rounds until every rank was probed.
    pub fn rounds_for_all(ranks: u16) -> u64 {
        u64::from(ranks.div_ceil(RANKS_PER_ROUND)).max(2)
    }

    /// Every probe's rank.
    pub fn ranks(&self) -> impl Iterator<Item = RankId> {
        let repeat = |(rank, count): (u16, &u32)| std::iter::repeat_n(RankId::new(rank), *count as usize);
        (0..).zip(&self.per_rank).flat_map(repeat)
    }

    /// Probes of the round.
    pub fn probes(&self) -> u64 {
        self.per_rank.iter().map(|count| u64::from(*count)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_reach_every_rank_and_neighbours_differ() {
        for ranks in [1_u16, 2, 3, 4, 7, 8, 9, 16, 64, 129] {
            let mut seen = vec![0; usize::from(ranks)];
            for number in 0..ProbePlan::rounds_for_all(ranks) {
                let plan = ProbePlan::round(number, ranks);
                assert_eq!(plan.ranks().count() as u64, plan.probes());
                assert!((1..=24).contains(&plan.probes()), "{ranks} ranks: {plan:?}");
                for (seen, count) in seen.iter_mut().zip(&plan.per_rank) {
                    *seen += count;
                }
                if (2..=8).contains(&ranks) {
                    assert!(plan.per_rank.windows(2).all(|pair| pair[0] != pair[1]), "{plan:?}");
                }
            }
            assert!(seen.iter().all(|count| *count > 0), "{ranks} ranks: {seen:?}");
        }
    }
}
