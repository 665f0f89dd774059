//! The kernels against naive references, over any shapes, and their rejections.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use proptest::prelude::*;
use semmoe_kernels::{DispatchPlan, KernelError, RankOrder, add_weighted_rows, argsort_by_rank};

#[derive(Clone, Debug)]
struct Routed {
    ranks: usize,
    top_k: usize,
    rank_of_expert: Vec<u16>,
    experts: Vec<u16>,
    weights: Vec<f32>,
}

/// Tokens with distinct experts each, on 1 to 8 ranks, including ranks without experts and zero tokens.
fn routed() -> impl Strategy<Value = Routed> {
    (1usize..=8, 1usize..=16).prop_flat_map(|(ranks, experts)| {
        let hosts = prop::collection::vec(0..ranks as u16, experts);
        (hosts, 1..=experts, 0usize..40).prop_flat_map(move |(rank_of_expert, top_k, tokens)| {
            let ids: Vec<u16> = (0..experts as u16).collect();
            let token = Just(ids).prop_shuffle().prop_map(move |ids| ids[..top_k].to_vec());
            let weights = prop::collection::vec(-2.0f32..2.0, tokens * top_k);
            (prop::collection::vec(token, tokens), weights).prop_map(move |(rows, weights)| Routed {
                ranks,
                top_k,
                rank_of_expert: rank_of_expert.clone(),
                experts: rows.concat(),
                weights,
            })
        })
    })
}

impl Routed {
    fn plan(&self) -> DispatchPlan {
        let mut plan = DispatchPlan::default();
        plan.build(&self.experts, &self.weights, self.top_k, &self.rank_of_expert, self.ranks).unwrap();
        plan
    }

    /// (token, [(expert, weight)]) of one rank, by checking every token.
    fn naive(&self, rank: usize) -> Vec<(u32, Vec<(u16, f32)>)> {
        let tokens = self.experts.chunks(self.top_k).zip(self.weights.chunks(self.top_k));
        tokens
            .enumerate()
            .map(|(token, (experts, weights))| {
                let pairs = experts.iter().copied().zip(weights.iter().copied());
                let here = |e: u16| usize::from(self.rank_of_expert[usize::from(e)]) == rank;
                (token as u32, pairs.filter(|p| here(p.0)).collect::<Vec<_>>())
            })
            .filter(|(_, pairs)| !pairs.is_empty())
            .collect()
    }
}

proptest! {
    #[test]
    fn argsort_is_the_stable_sort(
        (ranks, destinations) in (1usize..9).prop_flat_map(|r| {
            (Just(r), prop::collection::vec(0..r as u16, 0..200))
        })
    ) {
        let mut order = RankOrder::default();
        // Earlier content of scratch must not show.
        argsort_by_rank(&[0u16, 0, 0], 1, &mut order).unwrap();
        argsort_by_rank(&destinations, ranks, &mut order).unwrap();
        let mut expected: Vec<u32> = (0..destinations.len() as u32).collect();
        expected.sort_by_key(|&i| destinations[i as usize]);
        prop_assert_eq!(order.permutation(), &expected[..]);
        for (position, &item) in expected.iter().enumerate() {
            prop_assert_eq!(order.inverse()[item as usize] as usize, position);
        }
        prop_assert_eq!(order.offsets().len(), ranks + 1);
        for rank in 0..ranks {
            prop_assert!(order.items(rank).iter().all(|&i| usize::from(destinations[i as usize]) == rank));
        }
        prop_assert_eq!(order.offsets()[ranks] as usize, destinations.len());
        let mut wide = RankOrder::default();
        argsort_by_rank(&destinations.iter().map(|&to| u32::from(to)).collect::<Vec<_>>(), ranks, &mut wide).unwrap();
        prop_assert_eq!(wide, order);
    }

    #[test]
    fn argsort_names_the_first_destination_out_of_range(
        ranks in 0usize..9, n in 1usize..100, seed: u64, found in any::<u32>()
    ) {
        let index = seed as usize % n;
        let found = found.max(ranks as u32);
        let mut destinations: Vec<u32> = (0..n).map(|i| if ranks == 0 { 0 } else { i as u32 % ranks as u32 }).collect();
        destinations[index] = found;
        let (index, found) = if ranks == 0 { (0, destinations[0]) } else { (index, found) };
        let error = argsort_by_rank(&destinations, ranks, &mut RankOrder::default()).unwrap_err();
        let bound = ranks;
        prop_assert_eq!(error, KernelError::OutOfRange { what: "destination", index, found: found as usize, bound });
    }

    #[test]
    fn a_token_is_sent_once_to_each_of_its_ranks_with_all_its_experts_there(routed in routed()) {
        let plan = routed.plan();
        let mut pairs_in_all = 0;
        for rank in 0..routed.ranks {
            let rows = plan.rank(rank);
            let mut pairs = rows.experts.iter().copied().zip(rows.weights.iter().copied());
            let found: Vec<_> = rows.tokens.iter().zip(rows.pairs)
                .map(|(&token, &count)| (token, pairs.by_ref().take(usize::from(count)).collect::<Vec<_>>()))
                .collect();
            prop_assert_eq!(found, routed.naive(rank));
            prop_assert_eq!(pairs.count(), 0);
            pairs_in_all += rows.experts.len();
        }
        prop_assert_eq!(pairs_in_all, routed.experts.len());
    }

    #[test]
    fn building_again_in_the_same_scratch_gives_the_same_plan(routed in routed()) {
        let mut plan = routed.plan();
        let first = plan.clone();
        plan.build(&routed.experts, &routed.weights, routed.top_k, &routed.rank_of_expert, routed.ranks).unwrap();
        prop_assert_eq!(&plan, &first);
    }

    #[test]
    fn adding_gathered_rows_back_multiplies_by_their_weight_and_count(
        rows in prop::collection::vec(0u32..10, 0..30), hidden in 1usize..9
    ) {
        let source: Vec<f32> = (0..10 * hidden).map(|i| i as f32).collect();
        let gathered: Vec<f32> = rows.iter().flat_map(|&row| source[row as usize * hidden..][..hidden].to_vec()).collect();
        let mut sums = vec![0.0; source.len()];
        add_weighted_rows(&gathered, &rows, &vec![2.0; rows.len()], hidden, &mut sums).unwrap();
        for row in 0..10u32 {
            let count = rows.iter().filter(|&&r| r == row).count() as f32;
            for h in 0..hidden {
                let at = row as usize * hidden + h;
                prop_assert_eq!(sums[at], 2.0 * count * source[at]);
            }
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_refused_by_name() {
    let out_of_range = |what, index, found, bound| KernelError::OutOfRange { what, index, found, bound };
    let length = |what, found, expected| KernelError::Length { what, found, expected };
    let mut order = RankOrder::default();
    let mut plan = DispatchPlan::default();
    let hosts = [0, 1];
    for (found, expected) in [
        (argsort_by_rank(&[0u16, 2], 2, &mut order), out_of_range("destination", 1, 2, 2)),
        (plan.build(&[0, 2], &[1.0, 1.0], 2, &hosts, 2), out_of_range("expert", 1, 2, 2)),
        (plan.build(&[0, 1], &[1.0, 1.0], 2, &[0, 5], 2), out_of_range("rank of expert", 1, 5, 2)),
        (plan.build(&[0, 1, 0], &[1.0; 3], 2, &hosts, 2), length("experts", 3, 2)),
        (plan.build(&[0, 1], &[1.0], 2, &hosts, 2), length("weights", 1, 2)),
        (plan.build(&[], &[], 0, &hosts, 2), KernelError::NoPairs { row: 0 }),
        (plan.build_forward(&[1, 0], &[0], &[1.0], 2), KernelError::NoPairs { row: 1 }),
        (add_weighted_rows(&[0.0; 2], &[0], &[], 2, &mut [0.0; 2]), length("weights", 0, 1)),
    ] {
        assert_eq!(found, Err(expected));
    }
    assert_eq!(KernelError::NoPairs { row: 1 }.to_string(), "row 1 has no pairs, expected at least 1");
}
