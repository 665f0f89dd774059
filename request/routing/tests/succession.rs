//! Accounts and prefix tables that continue from others: nothing is lost or counted twice when ranks join, leave and
//! move.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use proptest::prelude::*;
use semmoe_routing::{Accounts, PrefixSettings, PrefixTable, Settings, TablePrice, Work};

fn work(tokens: u64) -> Work {
    Work { tokens, pending: tokens / 2, output: tokens as u32 / 4, sequences: 2 }
}

/// Old rank to new rank, the inverse of `from`.
fn moved(from: &[Option<u16>], old: u16) -> Option<u16> {
    let at = from.iter().position(|from| *from == Some(old))?;
    u16::try_from(at).ok()
}

/// Some of `ranks` old ranks in another order, with new ones in between.
fn successions(ranks: u16) -> impl Strategy<Value = Vec<Option<u16>>> {
    let old: Vec<Option<u16>> = (0..ranks).map(Some).chain([None, None]).collect();
    (Just(old).prop_shuffle(), 1usize..=usize::from(ranks) + 2).prop_map(|(mut ranks, keep)| {
        ranks.truncate(keep);
        ranks
    })
}

proptest! {
    /// A request held by the old accounts is counted out there, and both accounts see the rank's counts.
    #[test]
    fn what_is_in_flight_belongs_to_the_rank(
        from in successions(4),
        before in prop::collection::vec((0u16..4, 1u64..1000), 0..40),
        late in prop::collection::vec((0u16..4, 1u64..1000), 0..10),
        after in prop::collection::vec((0usize..6, 1u64..1000), 0..40),
    ) {
        let settings = Settings::default();
        let old = Accounts::new(4, &[], &settings);
        for (rank, tokens) in &before {
            old.assign(*rank, work(*tokens));
        }
        let new = old.succeed(&from, &[], &settings);
        for (rank, tokens) in &late {
            old.assign(*rank, work(*tokens));
        }
        let after: Vec<(u16, u64)> =
            after.into_iter().map(|(rank, tokens)| ((rank % from.len()) as u16, tokens)).collect();
        for (rank, tokens) in &after {
            new.assign(*rank, work(*tokens));
        }
        let (seen_old, seen_new) = (old.counted(), new.counted());
        for (rank, load) in (0u16..).zip(&seen_new) {
            let old_ones = before.iter().chain(&late).filter(|(old, _)| moved(&from, *old) == Some(rank));
            let new_ones = after.iter().filter(|(new, _)| *new == rank);
            let all: Vec<u64> = old_ones.chain(new_ones).map(|(_, tokens)| *tokens).collect();
            prop_assert_eq!(load.in_flight_requests as usize, all.len());
            prop_assert_eq!(load.in_flight_tokens, all.iter().map(|tokens| tokens + tokens / 4).sum::<u64>());
            prop_assert_eq!(load.pending_tokens, all.iter().map(|tokens| tokens / 2).sum::<u64>());
        }
        for (rank, load) in (0u16..).zip(&seen_old) {
            if let Some(to) = moved(&from, rank) {
                prop_assert_eq!(load.in_flight_tokens, seen_new[usize::from(to)].in_flight_tokens);
            }
        }
        for (rank, tokens) in before.iter().chain(&late) {
            old.release(*rank, work(*tokens));
        }
        for (rank, tokens) in &after {
            new.release(*rank, work(*tokens));
        }
        for load in new.counted().iter().chain(&old.counted()) {
            prop_assert_eq!((load.in_flight_requests, load.in_flight_tokens, load.pending_tokens), (0, 0, 0));
        }
    }

    /// With unchanged ranks and settings every figure stays, and the next request is counted as before.
    #[test]
    fn the_same_ranks_go_on_as_they_were(
        assigned in prop::collection::vec((0u16..3, 1u64..1000), 0..2000),
        prices in prop::collection::vec(-0.5f32..0.5, 3),
        next in (0u16..3, 1u64..1000),
    ) {
        let settings = Settings::default();
        let prices = TablePrice::of_ranks(3, &prices, &prices[1..]);
        let old = Accounts::new(3, &prices, &settings);
        for (rank, tokens) in &assigned {
            old.assign(*rank, work(*tokens));
        }
        let new = old.succeed(&[Some(0), Some(1), Some(2)], &prices, &settings);
        prop_assert_eq!(new.counted(), old.counted());
        // One more in each; the accounts share only the counts in flight.
        old.assign(next.0, work(next.1));
        old.release(next.0, work(next.1));
        new.assign(next.0, work(next.1));
        new.release(next.0, work(next.1));
        prop_assert_eq!(new.counted(), old.counted());
    }

    /// A rank's estimated cache content moves with it and is evicted in the same order.
    #[test]
    fn believed_caches_move_with_their_ranks(
        from in successions(3),
        noted in prop::collection::vec((0u16..3, prop::collection::vec(1u64..30, 1..5)), 0..40),
        later in prop::collection::vec(1u64..30, 1..4),
    ) {
        // Six blocks fit into one bucket of the index, so none is left out of it.
        let settings = PrefixSettings { block_tokens: 1, blocks_per_rank: 2 };
        let old = PrefixTable::new(3, &settings).unwrap();
        for (rank, chain) in &noted {
            old.record(*rank, chain);
        }
        let new = PrefixTable::succeed(Some(&old), &from, &settings).unwrap();
        let compare = || {
            for block in 1u64..30 {
                let (mut held, mut moved) = ([0; 3], vec![0; from.len()]);
                old.cached(&[block], &mut held);
                new.cached(&[block], &mut moved);
                let expected: Vec<u64> =
                    from.iter().map(|from| from.map_or(0, |from| held[usize::from(from)])).collect();
                assert_eq!(moved, expected, "{block}");
            }
        };
        compare();
        for (rank, from) in (0u16..).zip(&from) {
            if let Some(from) = from {
                old.record(*from, &later);
                new.record(rank, &later);
            }
        }
        compare();
    }
}

#[test]
fn newcomers_are_away_until_they_come_and_are_then_neither_flooded_nor_spared() {
    let settings = Settings::default();
    let old = Accounts::new(2, &[], &settings);
    for request in 0..200 {
        old.assign(request % 2, work(100));
    }
    let new = old.succeed(&[Some(1), None, Some(0)], &[], &settings);
    let loads = new.counted();
    assert!(loads[0].available && !loads[1].available && loads[2].available);
    new.set_available(1, true);
    let loads = new.counted();
    assert!(loads[1].available && !loads[1].known);
    assert!((loads[1].recent_tokens - loads[0].recent_tokens).abs() < 1.0, "{loads:?}");
    assert!((loads[1].price - loads[0].price).abs() < 1e-9, "{loads:?}");
}

#[test]
fn other_blocks_or_none_start_empty() {
    let settings = PrefixSettings { block_tokens: 2, blocks_per_rank: 4 };
    let old = PrefixTable::new(1, &settings).unwrap();
    old.record(0, &[7]);
    let held = |table: &PrefixTable| {
        let mut held = [0];
        table.cached(&[7], &mut held);
        held[0]
    };
    assert_eq!(held(&PrefixTable::succeed(Some(&old), &[Some(0)], &settings).unwrap()), 2);
    let other = PrefixSettings { block_tokens: 3, ..settings };
    assert_eq!(held(&PrefixTable::succeed(Some(&old), &[Some(0)], &other).unwrap()), 0);
    assert_eq!(held(&PrefixTable::succeed(None, &[Some(0)], &settings).unwrap()), 0);
    let none = PrefixSettings { blocks_per_rank: 0, ..settings };
    assert!(PrefixTable::succeed(Some(&old), &[Some(0)], &none).is_none());
}
