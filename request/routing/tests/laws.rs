//! Laws that hold for every stream of requests: the cap, balance, no starvation, choosing is pure, counts return.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use proptest::prelude::*;
use semmoe_routing::{
    Accounts, Affinity, Choice, Decision, NAMES, Policy, PrefixSettings, RankLoad, Request, RoundRobin, Router,
    Settings, TablePrice, Work, policy,
};

fn work(tokens: u64) -> Work {
    Work { tokens, ..Work::default() }
}

/// Runs `requests` through a policy with `concurrency` of them in flight; returns the tokens that each rank got.
fn run(policy: &dyn Policy, accounts: &Accounts, requests: &[(u64, Vec<f64>)], concurrency: usize) -> Vec<u64> {
    let mut tokens_per_rank = vec![0; accounts.ranks()];
    let mut placed: Vec<(u16, u64)> = Vec::new();
    for (sequence, (tokens, share)) in requests.iter().enumerate() {
        if let Some(&(rank, tokens)) = sequence.checked_sub(concurrency).and_then(|done| placed.get(done)) {
            assert!(accounts.release(rank, work(tokens)));
        }
        let request = Request { tokens: *tokens, share: Some(share), ..Request::default() };
        let choice = policy.choose(&request, &accounts.loads(), sequence as u64).unwrap();
        assert!(accounts.assign(choice.rank, work(*tokens)));
        placed.push((choice.rank, *tokens));
        tokens_per_rank[usize::from(choice.rank)] += tokens;
    }
    for &(rank, tokens) in placed.iter().rev().take(concurrency) {
        assert!(accounts.release(rank, work(tokens)));
    }
    tokens_per_rank
}

fn max_over_mean(tokens_per_rank: &[u64]) -> f64 {
    let most = tokens_per_rank.iter().copied().max().unwrap() as f64;
    most * tokens_per_rank.len() as f64 / tokens_per_rank.iter().sum::<u64>() as f64
}

fn affinity() -> Affinity {
    Affinity::new(&Settings::default())
}

/// Scores that try to push everything to few ranks.
#[derive(Clone, Copy, Debug)]
enum Adversary {
    AlwaysFirst,
    AllButLast,
    Blocks,
    Random,
    LongToFirst,
}

fn stream(adversary: Adversary, ranks: usize, requests: usize, seed: u64) -> Vec<(u64, Vec<f64>)> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..requests)
        .map(|i| {
            let tokens = random.u64(1..=512);
            let wants = |rank: usize| match adversary {
                Adversary::AlwaysFirst => rank == 0,
                Adversary::AllButLast => rank + 1 < ranks,
                Adversary::Blocks => rank == (i / 100) % ranks,
                Adversary::Random => false,
                Adversary::LongToFirst => (rank == 0) == (tokens > 256),
            };
            let share = (0..ranks).map(|rank| f64::from(u8::from(wants(rank))) * 0.9 + 0.1 * random.f64()).collect();
            (tokens, share)
        })
        .collect()
}

#[test]
fn adversarial_scores_stay_within_a_fifth_of_even() {
    let streams =
        [Adversary::AlwaysFirst, Adversary::AllButLast, Adversary::Blocks, Adversary::Random, Adversary::LongToFirst];
    for adversary in streams {
        for ranks in [2, 4, 8, 16, 64] {
            for concurrency in [1, 32, 400] {
                let requests = stream(adversary, ranks, 150 * ranks, 7);
                let accounts = Accounts::new(ranks as u16, &[], &Settings::default());
                let tokens = run(&affinity(), &accounts, &requests, concurrency);
                let imbalance = max_over_mean(&tokens);
                assert!(imbalance <= 1.2, "{adversary:?}, {ranks} ranks, {concurrency} in flight: {imbalance}");
            }
        }
    }
}

/// Prices grow until an unwanted rank is taken: its shortfall is at most gap / step mean requests.
#[test]
fn no_rank_starves() {
    for adversary in [Adversary::AlwaysFirst, Adversary::AllButLast] {
        for ranks in [2, 8, 64] {
            let requests = stream(adversary, ranks, 1000 * ranks, 11);
            let accounts = Accounts::new(ranks as u16, &[], &Settings::default());
            let tokens = run(&affinity(), &accounts, &requests, 16 * ranks);
            let least = *tokens.iter().min().unwrap() as f64 * ranks as f64 / tokens.iter().sum::<u64>() as f64;
            assert!(least >= 0.5, "{adversary:?}, {ranks} ranks: the least loaded got {least} of the mean");
        }
    }
}

#[test]
fn wrong_table_prices_are_unlearnt() {
    for start in [[1.0f32, 0.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.5], [f32::NAN, f32::INFINITY, 9.0, 0.0]] {
        let prices = TablePrice::of_ranks(4, &start, &start);
        let accounts = Accounts::new(4, &prices, &Settings::default());
        let tokens = run(&affinity(), &accounts, &stream(Adversary::Random, 4, 2000, 3), 32);
        assert!(max_over_mean(&tokens) <= 1.2, "{start:?}: {tokens:?}");
    }
}

#[test]
fn prices_start_from_the_tables() {
    let prices = TablePrice::of_ranks(3, &[0.1, 0.2], &[0.0, 0.5, f32::NAN]);
    let accounts = Accounts::new(3, &prices, &Settings::default());
    let started = accounts.loads();
    let of = |load: &RankLoad| (load.price as f32, load.sequence_price as f32);
    assert_eq!(started.iter().map(of).collect::<Vec<_>>(), [(0.1, 0.0), (0.2, 0.5), (0.0, 0.0)]);
    accounts.assign(1, work(100));
    let after = accounts.loads();
    assert!(after[1].sequence_price > 0.5 && after[0].sequence_price < 0.0, "{after:?}");
    accounts.reset_prices(&[]);
    assert!(accounts.loads().iter().all(|load| load.sequence_price == 0.0));
}

#[test]
fn ties_go_round() {
    let accounts = Accounts::new(4, &[], &Settings::default());
    let idle: Vec<u16> = (0..8)
        .map(|sequence| {
            let request = Request { tokens: 5, ..Request::default() };
            affinity().choose(&request, &accounts.loads(), sequence).unwrap().rank
        })
        .collect();
    assert_eq!(idle, [0, 1, 2, 3, 0, 1, 2, 3]);
    let share = [0.25, 0.3, 0.3, 0.15];
    let picks: Vec<u16> = (0..4)
        .map(|sequence| {
            let request = Request { tokens: 5, share: Some(&share), ..Request::default() };
            affinity().choose(&request, &accounts.loads(), sequence).unwrap().rank
        })
        .collect();
    assert_eq!(picks, [1, 1, 2, 1]);
}

#[test]
fn without_evidence_the_lighter_rank_is_taken() {
    let accounts = Accounts::new(3, &TablePrice::of_ranks(3, &[0.0, -0.9, 0.9], &[]), &Settings::default());
    accounts.assign(0, work(100));
    accounts.assign(1, work(100));
    for share in [None, Some([0.5; 3]), Some([f64::NAN, 0.9, 0.1])] {
        let request = Request { tokens: 10, share: share.as_ref().map(|share| &share[..]), ..Request::default() };
        assert_eq!(affinity().choose(&request, &accounts.loads(), 0).unwrap().rank, 2);
    }
    let short = Request { tokens: 10, share: Some(&[0.9, 0.1]), ..Request::default() };
    assert_eq!(affinity().choose(&short, &accounts.loads(), 0).unwrap().rank, 2);
}

/// One more prompt waits where the experts are. That is worth it if all ranks have queues, but not if the others are
/// idle.
#[test]
fn a_long_queue_everywhere_does_not_drown_what_is_local() {
    let accounts = Accounts::new(4, &[], &Settings::default());
    let share = [0.55, 0.15, 0.15, 0.15];
    let request = Request { tokens: 100, share: Some(&share), ..Request::default() };
    let waiting = Work { tokens: 100, pending: 100, ..Work::default() };
    accounts.assign(0, Work { pending: 600, ..waiting });
    assert_ne!(affinity().choose(&request, &accounts.loads(), 0).unwrap().rank, 0);
    for rank in (0..4).cycle().take(80) {
        accounts.assign(rank, waiting);
    }
    assert_eq!(affinity().choose(&request, &accounts.loads(), 0).unwrap().rank, 0);
    let nothing_known = Request { share: None, ..request };
    assert_ne!(affinity().choose(&nothing_known, &accounts.loads(), 0).unwrap().rank, 0, "backlog decides alone");
}

#[test]
fn unavailable_ranks_are_never_taken_and_come_back_unflooded() {
    let accounts = Accounts::new(4, &[], &Settings::default());
    let shares = vec![0.9, 0.1, 0.1, 0.1];
    assert!(accounts.set_available(0, false));
    let policies: [&dyn Policy; 2] = [&affinity(), &RoundRobin];
    for policy in policies {
        for sequence in 0..64 {
            let request = Request { tokens: 10, share: Some(&shares), ..Request::default() };
            let choice = policy.choose(&request, &accounts.loads(), sequence).unwrap();
            assert_ne!(choice.rank, 0);
            accounts.assign(choice.rank, work(10));
        }
    }
    assert!(accounts.set_available(0, true));
    let of: Vec<f64> = accounts.loads().iter().map(|load| load.recent_tokens).collect();
    assert!((of[0] - (of[1] + of[2] + of[3]) / 3.0).abs() < 1e-9, "{of:?}");
    for rank in 0..4 {
        accounts.set_available(rank, false);
    }
    for policy in policies {
        let request = Request { tokens: 10, share: Some(&shares), ..Request::default() };
        assert_eq!(policy.choose(&request, &accounts.loads(), 0), None);
        assert_eq!(policy.choose(&request, &[], 0), None);
    }
}

#[test]
fn round_robin_is_strictly_cyclic() {
    let mut loads = [RankLoad::IDLE; 5];
    loads[2].available = false;
    let picks: Vec<u16> = (0..8)
        .map(|sequence| RoundRobin.choose(&Request { tokens: 1, ..Request::default() }, &loads, sequence).unwrap().rank)
        .collect();
    assert_eq!(picks, [0, 1, 3, 4, 0, 1, 3, 4]);
}

#[test]
fn no_such_rank_counts_nothing() {
    let accounts = Accounts::new(2, &[], &Settings::default());
    assert!(!accounts.assign(2, work(10)));
    assert!(!accounts.release(9, work(10)));
    assert!(!accounts.set_available(2, false));
    assert_eq!(accounts.loads(), [RankLoad::IDLE; 2]);
}

#[test]
fn huge_counts_do_not_overflow() {
    let accounts = Accounts::new(2, &[], &Settings::default());
    for _ in 0..4 {
        accounts.assign(0, work(u64::MAX));
    }
    assert!(accounts.loads().iter().all(|load| load.recent_tokens.is_finite()));
    assert!(accounts.loads().iter().all(|load| load.price.is_finite()));
    let request = Request { tokens: u64::MAX, ..Request::default() };
    assert_eq!(affinity().choose(&request, &accounts.loads(), 0).unwrap().rank, 1);
}

#[test]
fn the_paper_serves_every_rank_once_a_round_and_the_best_first() {
    let policy = policy("affinity_paper").unwrap();
    let accounts = Accounts::new(4, &[], &Settings::default());
    let share = [0.1, 0.4, 0.3, 0.2];
    let request = Request { tokens: 9, share: Some(&share), ..Request::default() };
    let mut chosen = Vec::new();
    for sequence in 0..8 {
        let choice = policy.choose(&request, &accounts.loads(), sequence).unwrap();
        accounts.assign(choice.rank, work(request.tokens));
        chosen.push((choice.rank, choice.capped));
    }
    let round = [(1, false), (2, true), (3, true), (0, true)];
    assert_eq!(chosen, [round, round].concat());
}

#[test]
fn a_rank_that_comes_back_joins_the_paper_s_round() {
    let policy = policy("affinity_paper").unwrap();
    let accounts = Accounts::new(3, &[], &Settings::default());
    accounts.set_available(2, false);
    let request = Request { tokens: 1, ..Request::default() };
    let next = |accounts: &Accounts, sequence| {
        let choice = policy.choose(&request, &accounts.loads(), sequence).unwrap();
        accounts.assign(choice.rank, work(1));
        choice.rank
    };
    (0..10).for_each(|sequence| assert_ne!(next(&accounts, sequence), 2));
    accounts.set_available(2, true);
    let mut round: Vec<u16> = (10..13).map(|sequence| next(&accounts, sequence)).collect();
    round.sort_unstable();
    assert_eq!(round, [0, 1, 2]);
}

#[test]
fn random_is_even_and_two_choices_are_evener() {
    let requests: Vec<(u64, Vec<f64>)> = (0..4000).map(|_| (100, Vec::new())).collect();
    let imbalance = |name| {
        let accounts = Accounts::new(8, &[], &Settings::default());
        max_over_mean(&run(policy(name).unwrap().as_ref(), &accounts, &requests, 400))
    };
    let (random, two) = (imbalance("random"), imbalance("power_of_two"));
    assert!(random < 1.15, "{random}");
    assert!(two < 1.02 && two < random, "{two}, {random}");
}

fn loads() -> impl Strategy<Value = Vec<RankLoad>> {
    let load = (0u64..100_000, 0u32..100, 0.0..1e6, prop::bool::weighted(0.8)).prop_map(
        |(in_flight_tokens, in_flight_requests, recent_tokens, available)| RankLoad {
            in_flight_tokens,
            in_flight_requests,
            in_flight_sequences: in_flight_requests.into(),
            pending_tokens: in_flight_tokens / 3,
            recent_tokens,
            recent_requests: recent_tokens / 100.0,
            assigned_requests: u64::from(in_flight_requests / 10),
            price: recent_tokens / 2e6 - 0.25,
            available,
            ..RankLoad::IDLE
        },
    );
    prop::collection::vec(load, 1..12)
}

proptest! {
    #[test]
    fn the_cap_holds_and_choosing_is_pure(
        loads in loads(), tokens in 0u64..10_000, seed: u64, sequence: u64, scored: bool,
    ) {
        let settings = Settings::default();
        let mut random = fastrand::Rng::with_seed(seed);
        let share: Vec<f64> = loads.iter().map(|_| random.f64()).collect();
        let cached: Vec<u64> = loads.iter().map(|_| random.u64(0..=tokens)).collect();
        let (output, sequences) = (random.u64(0..1000), random.u32(0..4));
        let share_of = scored.then_some(&share[..]);
        let request = Request { tokens, output, sequences, share: share_of, cached: Some(&cached), key: Some(seed), settled: false };
        for policy in NAMES.map(|name| policy(name).unwrap()) {
            let choice = policy.choose(&request, &loads, sequence);
            prop_assert_eq!(choice, policy.choose(&request, &loads.clone(), sequence));
            let available: Vec<&RankLoad> = loads.iter().filter(|load| load.available).collect();
            let Some(Choice { rank, expected_share, capped }) = choice else {
                prop_assert!(available.is_empty());
                continue;
            };
            let chosen = loads[usize::from(rank)];
            prop_assert!(chosen.available);
            prop_assert_eq!(expected_share, scored.then(|| share[usize::from(rank)]));
            if matches!(policy.name(), "affinity" | "prefix" | "sticky") {
                let ranks = available.len() as f64;
                let total = |value: fn(&RankLoad) -> f64| available.iter().map(|load| value(load)).sum::<f64>();
                let recent = total(|load| load.recent_tokens);
                let mean = (recent + tokens.max(1) as f64) / ranks;
                let room = settings.load_slack * 100.0 * (recent / 100.0 / ranks).sqrt();
                let even = chosen.recent_tokens <= ((1.0 + settings.load_margin) * mean + room) * (1.0 + 1e-12);
                let uncached = |rank: usize| tokens.max(1).saturating_sub(cached[rank]);
                let others = (0..loads.len()).filter(|&rank| loads[rank].available);
                let held = others.map(uncached).max() > Some(uncached(usize::from(rank)));
                let sequences = total(|load| load.in_flight_sequences as f64) + f64::from(sequences.max(1));
                let busy = chosen.in_flight_sequences as f64 > 1.5 * sequences / ranks + 2.0;
                let least = available.iter().all(|load| chosen.recent_tokens <= load.recent_tokens);
                prop_assert!(least || !busy && (policy.name() == "sticky" || held || even));
            } else if policy.name() == "affinity_paper" {
                let round = available.iter().map(|load| load.assigned_requests).min();
                prop_assert_eq!(Some(chosen.assigned_requests), round);
            } else {
                prop_assert!(!capped);
            }
            if policy.name() == "least_load" {
                prop_assert!(available.iter().all(|load| chosen.in_flight_tokens <= load.in_flight_tokens));
            }
        }
    }

    #[test]
    fn counts_return_to_zero(seed: u64, ranks in 1usize..9, requests in 1usize..200, concurrency in 1usize..64) {
        let requests = stream(Adversary::Random, ranks, requests, seed);
        let accounts = Accounts::new(ranks as u16, &[], &Settings::default());
        let total: u64 = run(&affinity(), &accounts, &requests, concurrency).iter().sum();
        prop_assert_eq!(total, requests.iter().map(|(tokens, _)| tokens).sum::<u64>());
        for load in accounts.loads() {
            prop_assert_eq!((load.in_flight_tokens, load.in_flight_requests), (0, 0));
        }
    }
}

proptest! {
    /// A refused request leaves nothing behind: loads, prices and estimated caches are as before it arrived.
    #[test]
    fn what_is_taken_back_was_never_there(
        requests in prop::collection::vec((0u16..3, 1u64..500, 0u64..4, any::<bool>()), 1..60),
    ) {
        let (settings, prefix) = (Settings::default(), PrefixSettings { block_tokens: 1, blocks_per_rank: 1024 });
        let router = || Router::new(3, &[], &settings, &prefix);
        let (real, clean) = (router(), router());
        for (rank, tokens, prompt, refused) in requests {
            let blocks: Vec<u64> = (0..tokens.min(20)).map(|at| 1 + at + 1000 * prompt.min(at)).collect();
            let work = work(tokens);
            let choice = Choice { rank, expected_share: None, capped: false };
            let decision = Decision { choice, work, cached: None, session: None };
            let new = real.assign(&decision, &blocks, true);
            if refused {
                real.take_back(rank, work, &blocks, new);
            } else {
                prop_assert_eq!(clean.assign(&decision, &blocks, true), new);
            }
            let _ = (real.accounts().release(rank, work), refused || clean.accounts().release(rank, work));
            let held = |router: &Router| {
                let mut cached = [0; 3];
                router.prefixes().unwrap().cached(&blocks, &mut cached);
                cached
            };
            prop_assert_eq!(held(&real), held(&clean));
            for (real, clean) in real.accounts().counted().iter().zip(clean.accounts().counted()) {
                prop_assert_eq!((real.in_flight_tokens, real.assigned_requests), (0, clean.assigned_requests));
            }
        }
    }
}
