//! The expert step with replicas against exhaustion.

use proptest::prelude::*;

use super::*;

/// All subsets of `slots` experts, as bit masks.
fn choices(experts: usize, slots: usize) -> Vec<u32> {
    (0..1u32 << experts).filter(|mask| mask.count_ones() as usize == slots).collect()
}

/// The best gain over all choices that hold every expert and keep the loads within `cap`.
fn brute_force(layer: &ReplicaLayer<'_>) -> Option<i64> {
    let (experts, groups) = (layer.traffic.load.len(), layer.traffic.groups);
    let sets = choices(experts, layer.slots);
    let mut best = None;
    let mut index = vec![0; groups];
    loop {
        let masks: Vec<u32> = index.iter().map(|&at| sets[at]).collect();
        if masks.iter().fold(0, |all, mask| all | mask) == (1 << experts) - 1 {
            let holders: Vec<Vec<u16>> = (0..experts)
                .map(|e| (0..groups as u16).filter(|&g| masks[usize::from(g)] >> e & 1 == 1).collect())
                .collect();
            let found = layer.candidate(holders);
            if found.value.excess == 0 {
                best = best.max(Some(found.value.gain));
            }
        }
        let Some(at) = (0..groups).find(|&at| index[at] + 1 < sets.len()) else { return best };
        index[..at].fill(0);
        index[at] += 1;
    }
}

proptest! {
    #[test]
    fn one_layer_equals_brute_force(
        (groups, experts, slots) in prop::sample::select(
            vec![(2usize, 4usize, 2usize), (2, 4, 3), (3, 6, 2), (3, 6, 3), (4, 4, 2), (3, 5, 2), (2, 5, 5), (4, 5, 2)]),
        seed: u64, spread in 1i64..40, slack in 1.0f64..1.6,
    ) {
        let mut random = fastrand::Rng::with_seed(seed);
        // Skewed, so that groups want the same experts and others are left over.
        let own: Vec<i64> = (0..experts * groups).map(|at| random.i64(0..spread) + (at / groups) as i64 * 5).collect();
        let load: Vec<u64> = own.chunks_exact(groups).map(|row| row.iter().sum::<i64>() as u64).collect();
        let traffic = Traffic { load: &load, own: &own, fraction_bits: 0, groups };
        let layer = |cap| ReplicaLayer { traffic, slots, cap };
        let free = replicate_within(&layer(u64::MAX), None, &|| false);
        for group in 0..groups as u16 {
            prop_assert_eq!(free.iter().filter(|holders| holders.contains(&group)).count(), slots);
        }
        prop_assert!(free.iter().all(|holders| !holders.is_empty() && holders.is_sorted()));
        prop_assert_eq!(Some(layer(u64::MAX).candidate(free).value.gain), brute_force(&layer(u64::MAX)));

        let cap = (load.iter().sum::<u64>() as f64 * slack / groups as f64) as u64;
        let limited = layer(cap).candidate(replicate_within(&layer(cap), None, &|| false));
        prop_assert!(limited.holders.iter().all(|holders| !holders.is_empty()));
        prop_assert_eq!(limited.loads.iter().sum::<u64>(), load.iter().sum::<u64>());
        if limited.value.excess == 0 {
            prop_assert!(Some(limited.value.gain) <= brute_force(&layer(cap)));
        }
        let again = layer(cap).candidate(replicate_within(&layer(cap), Some(&limited.holders), &|| false));
        prop_assert!(!limited.value.beats(&again.value), "the current result is never replaced by a worse one");
    }

    #[test]
    fn without_replicas_it_is_the_balanced_assignment(
        (groups, slots) in prop::sample::select(vec![(2usize, 3usize), (4, 2), (4, 8), (3, 4)]), seed: u64,
    ) {
        let experts = groups * slots;
        let mut random = fastrand::Rng::with_seed(seed);
        let profit: Vec<i64> = (0..experts * groups).map(|_| random.i64(-50..50)).collect();
        let holders = best_holders(&profit, groups, slots, &|| false);
        prop_assert!(holders.iter().all(|holders| holders.len() == 1));
        let value: i64 = holders.iter().enumerate().map(|(e, held)| profit[e * groups + usize::from(held[0])]).sum();
        let (mass, capacity) = (vec![1; experts], vec![slots as u64; groups]);
        let plan = crate::step::transport::Transport { mass: &mass, profit: &profit, capacity: &capacity }.solve(None);
        prop_assert_eq!(i128::from(value), plan.primal);
    }
}
