//! `sticky`, `shadow` and its comparison, unknown loads, and counts under threads.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::HashMap;

use semmoe_routing::{
    Accounts, Comparison, PrefixSettings, Prompt, RankLoad, Request, Router, Scratch, Settings, Work, hash_key, policy,
    policy_with,
};

#[test]
fn a_key_stays_and_a_lost_rank_moves_only_its_own() {
    let sticky = policy("sticky").unwrap();
    let mut loads = [RankLoad::IDLE; 8];
    let place = |loads: &[RankLoad], key: u64| {
        let request = Request { tokens: 10, key: Some(hash_key(&key.to_le_bytes())), ..Request::default() };
        sticky.choose(&request, loads, key * 7).unwrap()
    };
    let before: Vec<u16> = (0..4000).map(|key| place(&loads, key).rank).collect();
    let mut counts = HashMap::new();
    before.iter().for_each(|rank| *counts.entry(*rank).or_insert(0) += 1);
    assert!(counts.len() == 8 && counts.values().all(|count| (400..=600).contains(count)), "{counts:?}");
    loads[3].available = false;
    for (key, before) in (0..).zip(&before) {
        let now = place(&loads, key).rank;
        assert_eq!(now != *before, *before == 3, "key {key}");
    }
    loads[3].available = true;
    // Recent tokens move no key. Too many sequences in flight do, to the ranks that had them while rank 3 was away.
    loads[3].recent_tokens = 1e6;
    loads[3].recent_requests = 10.0;
    let key = (0..).zip(&before).find(|(_, before)| **before == 3).map(|(key, _)| key).unwrap();
    assert_eq!(place(&loads, key).rank, 3);
    loads[3].in_flight_sequences = 6;
    let spilled = place(&loads, key);
    assert!(spilled.rank != 3 && spilled.capped);
}

#[test]
fn without_a_key_sticky_is_least_load() {
    let mut loads = [RankLoad::IDLE; 4];
    loads.iter_mut().zip([5, 3, 9, 3]).for_each(|(load, tokens)| load.in_flight_tokens = tokens);
    let request = Request { tokens: 10, ..Request::default() };
    for sequence in 0..4 {
        let of = |name| policy(name).unwrap().choose(&request, &loads, sequence);
        assert_eq!(of("sticky"), of("least_load"));
    }
}

/// Two kinds of prompts, each with its experts on one of two ranks, so affinity's gain is known.
#[test]
fn a_shadow_tells_what_affinity_would_have_gained() {
    let settings = Settings { baseline: "round_robin".to_owned(), load_margin: 10.0, ..Settings::default() };
    let shadow = policy_with("shadow", &settings).unwrap();
    let prefix = PrefixSettings::default();
    let (real, ghost) = (Router::new(2, &[], &settings, &prefix), Router::new(2, &[], &settings, &prefix));
    let comparison = Comparison::new(2);
    let mut scratch = Scratch::default();
    let homes = [[0.75, 0.25], [0.25, 0.75]];
    for sequence in 0..400 {
        let kind = usize::from(sequence % 4 >= 2);
        let blocks = [kind as u64];
        let prompt = Prompt { tokens: 100, share: Some(&homes[kind]), blocks: &blocks, ..Prompt::default() };
        let acting = real.decide(shadow.as_ref(), &prompt, sequence, None, &mut scratch).unwrap();
        let watched = ghost.decide(shadow.watched().unwrap(), &prompt, sequence, None, &mut scratch).unwrap();
        real.assign(&acting, prompt.blocks, true);
        ghost.assign(&watched, prompt.blocks, true);
        comparison.add(&acting, &watched);
        real.accounts().release(acting.choice.rank, acting.work);
        ghost.accounts().release(watched.choice.rank, watched.work);
    }
    let report = comparison.report();
    assert_eq!((report.requests, report.tokens, report.scored_tokens), (400, 40_000, 40_000));
    assert_eq!(report.acting.local_share, Some(0.5));
    assert_eq!(report.acting.tokens_max_over_mean, 1.0);
    assert!(report.watched.local_share.unwrap() > 0.74, "{report:?}");
    assert!(report.watched.tokens_max_over_mean < 1.05, "{report:?}");
    assert!(report.acting.cached_share.unwrap() > 0.5 && report.same_rank < 250, "{report:?}");
    assert_eq!(shadow.acting_name(), "round_robin");
}

/// A rank that came back counts as loaded as the others until it answers.
#[test]
fn an_unknown_load_is_not_an_idle_one() {
    let accounts = Accounts::new(3, &[], &Settings::default());
    for rank in [0, 1] {
        accounts.assign(rank, Work { tokens: 1000, pending: 600, ..Work::default() });
    }
    accounts.set_available(2, false);
    assert!(accounts.set_available(2, true));
    let back = accounts.loads()[2];
    assert_eq!(
        (back.known, back.in_flight_tokens, back.pending_tokens, back.in_flight_requests),
        (false, 1000, 600, 1)
    );
    assert_eq!(accounts.counted()[2].in_flight_tokens, 0);
    let first = |name: &str, accounts: &Accounts| {
        let request = Request { tokens: 10, ..Request::default() };
        policy(name).unwrap().choose(&request, &accounts.loads(), 0).unwrap().rank
    };
    for name in ["affinity", "prefix", "least_load"] {
        assert_eq!(first(name, &accounts), 0, "{name}: as good as the others, and not its turn");
    }
    accounts.answered(2);
    let known = accounts.loads()[2];
    assert_eq!((known.known, known.in_flight_tokens, known.pending_tokens), (true, 0, 0));
    assert_eq!(first("least_load", &accounts), 2);
}

#[test]
fn pending_tokens_leave_once() {
    let accounts = Accounts::new(1, &[], &Settings::default());
    let mut work = Work { tokens: 100, pending: 70, ..Work::default() };
    accounts.assign(0, work);
    assert_eq!(accounts.loads()[0].pending_tokens, 70);
    accounts.computed(0, &mut work);
    accounts.computed(0, &mut work);
    assert_eq!((accounts.loads()[0].pending_tokens, accounts.loads()[0].in_flight_tokens), (0, 100));
    accounts.release(0, work);
    assert_eq!(accounts.loads()[0].in_flight_tokens, 0);
    assert!(!accounts.computed(1, &mut work));
}

#[test]
fn keys_and_values_of_answers_count_as_expected_or_as_they_come() {
    let accounts = Accounts::new(2, &[], &Settings::default());
    let held = || accounts.counted()[0].in_flight_tokens;
    let mut work = Work { tokens: 100, output: 40, sequences: 2, ..Work::default() };
    accounts.assign(0, work);
    assert_eq!(held(), 140);
    for (generated, expected) in [(40, 140), (41, 100 + 41 + 16), (57, 100 + 57), (58, 100 + 58 + 16)] {
        assert!(accounts.generates(0, &mut work, generated));
        assert_eq!(held(), expected, "{generated}");
    }
    accounts.generated(300);
    accounts.generates(0, &mut work, 1000);
    assert_eq!(held(), 100 + 1000 + accounts.expected_output(None));
    accounts.generates(0, &mut work, u64::MAX);
    accounts.release(0, work);
    assert_eq!(held(), 0);
    assert!(!accounts.generates(2, &mut work, 5000));
}

/// The cap is exceeded by at most the requests being placed concurrently, and counts return to zero.
#[test]
fn threads_share_the_ranks() {
    const THREADS: u64 = 4;
    const TOKENS: u64 = 100;
    let settings = Settings::default();
    let router = Router::new(4, &[], &settings, &PrefixSettings::default());
    // All prefer rank 0.
    let share = [0.9, 0.1, 0.1, 0.1];
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let router = &router;
            scope.spawn(move || {
                let affinity = policy("affinity").unwrap();
                let (mut scratch, mut running) = (Scratch::default(), Vec::new());
                for i in 0..5000 {
                    let blocks = [i % 50, 1000 + i % 50];
                    let prompt = Prompt { tokens: TOKENS, share: Some(&share), blocks: &blocks, ..Prompt::default() };
                    let sequence = i * THREADS + thread;
                    let decision = router.decide(affinity.as_ref(), &prompt, sequence, None, &mut scratch).unwrap();
                    router.assign(&decision, &blocks, true);
                    running.push(decision);
                    if running.len() > 20 {
                        let done = running.remove(0);
                        router.accounts().release(done.choice.rank, done.work);
                    }
                    let loads = router.accounts().loads();
                    let of = |load: &RankLoad| load.in_flight_sequences as f64;
                    let most = loads.iter().map(of).fold(0.0, f64::max);
                    let cap = 1.5 * loads.iter().map(of).sum::<f64>() / 4.0 + 2.0;
                    // Reads are not atomic over ranks: concurrent writes may be visible on one rank and not yet on
                    // another.
                    assert!(most <= cap + 1.0 + 2.0 * THREADS as f64, "{most} of {cap}");
                }
                for done in running {
                    router.accounts().release(done.choice.rank, done.work);
                }
            });
        }
    });
    for load in router.accounts().loads() {
        assert_eq!((load.in_flight_tokens, load.in_flight_requests, load.pending_tokens), (0, 0, 0));
        assert_eq!(load.recent_tokens, 100.0 * load.recent_requests);
    }
    let sum = |value: fn(&RankLoad) -> f64| router.accounts().loads().iter().map(value).sum::<f64>();
    assert_eq!(sum(|load| load.recent_requests), f64::from(4 * settings.memory));
}
