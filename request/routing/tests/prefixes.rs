//! The prefix table against a plain model of it, and the cost that reads it.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use proptest::prelude::*;
use semmoe_routing::{PrefixSettings, PrefixTable, Prompt, Router, Scratch, Settings, block_hashes, policy};

/// Lists of blocks, most recent first.
struct Model {
    ranks: Vec<Vec<u64>>,
    room: usize,
}

impl Model {
    fn record(&mut self, rank: usize, chain: &[u64]) {
        for &block in chain[..chain.len().min(self.room)].iter().rev() {
            let held = &mut self.ranks[rank];
            held.retain(|other| *other != block);
            held.insert(0, block);
            held.truncate(self.room);
        }
    }

    fn held(&self, rank: usize, chain: &[u64]) -> u64 {
        chain.iter().take_while(|block| self.ranks[rank].contains(block)).count() as u64
    }
}

fn chain(ids: &[u32]) -> Vec<u64> {
    let mut chain = Vec::new();
    block_hashes(ids, 1, &mut chain);
    chain
}

proptest! {
    #[test]
    fn the_table_is_an_lru_of_each_rank(
        ranks in prop::sample::select(vec![1u16, 3, 64, 70]),
        room in 1u32..6,
        prompts in prop::collection::vec((0u16..70, prop::collection::vec(0u32..3, 0..8), prop::bool::weighted(0.05)), 0..80),
    ) {
        let table = PrefixTable::new(ranks, &PrefixSettings { block_tokens: 4, blocks_per_rank: room }).unwrap();
        let mut model = Model { ranks: vec![Vec::new(); usize::from(ranks)], room: room as usize };
        let mut cached = vec![7; usize::from(ranks)];
        for (rank, ids, forget) in prompts {
            let chain = chain(&ids);
            table.cached(&chain, &mut cached);
            for (rank, tokens) in cached.iter().enumerate() {
                prop_assert_eq!(*tokens, 4 * model.held(rank, &chain), "rank {}", rank);
            }
            let known = rank < ranks;
            prop_assert_eq!(table.record(rank, &chain).is_some(), known);
            if known {
                model.record(usize::from(rank), &chain);
                if forget {
                    prop_assert!(table.forget(rank));
                    model.ranks[usize::from(rank)].clear();
                }
            }
        }
    }
}

#[test]
fn block_names_of_a_trace_can_be_given_directly() {
    let table = PrefixTable::new(2, &PrefixSettings { block_tokens: 512, blocks_per_rank: 100 }).unwrap();
    assert_eq!(table.record(1, &[0, 1, 2]), Some(3));
    let mut cached = [0; 2];
    table.cached(&[0, 1, 7], &mut cached);
    assert_eq!(cached, [0, 1024]);
}

/// A full table finds nearly all of its blocks: an overflowing bucket only loses a hint.
#[test]
fn a_full_table_finds_its_blocks() {
    let settings = PrefixSettings { block_tokens: 1, blocks_per_rank: 4096 };
    let table = PrefixTable::new(8, &settings).unwrap();
    let block = |rank: u64, at: u64| rank << 32 | at;
    for rank in 0..8 {
        for at in 0..10_000 {
            table.record(rank as u16, &[block(rank, at)]);
        }
    }
    let mut cached = [0; 8];
    let mut found = 0;
    for rank in 0..8u64 {
        for at in 0..10_000 {
            table.cached(&[block(rank, at)], &mut cached);
            let expected = at >= 10_000 - 4096;
            assert!(cached.iter().enumerate().all(|(other, held)| *held == 0 || (other as u64 == rank && expected)));
            found += cached[rank as usize];
        }
    }
    assert!(found as f64 >= 0.985 * 8.0 * 4096.0, "{found} of {}", 8 * 4096);
    assert_eq!(PrefixTable::new(8, &PrefixSettings { blocks_per_rank: 0, ..settings }).map(|_| ()), None);
    assert!(PrefixTable::new(0, &settings).is_none());
    assert!(PrefixTable::new(u16::MAX, &settings).is_none());
    let many = PrefixTable::new(512, &PrefixSettings { blocks_per_rank: 1 << 10, ..settings }).unwrap();
    assert_eq!(many.blocks_per_rank(), 1 << 10);
    // The documented formula.
    assert_eq!(many.memory_bytes(), 512 * (1 << 10) * (100 + 16 * 8));
}

/// Conversations with long common beginnings: `prefix` keeps them on their rank, which load alone does not.
#[test]
fn turns_of_a_chat_return_to_their_rank() {
    let hit_share = |name: &str| {
        let settings = Settings::default();
        let prefix = PrefixSettings { block_tokens: 16, blocks_per_rank: 4096 };
        let router = Router::new(4, &[], &settings, &prefix);
        let policy = policy(name).unwrap();
        let mut scratch = Scratch::default();
        let mut random = fastrand::Rng::with_seed(5);
        let mut chats: Vec<Vec<u32>> = (0..40).map(|chat| vec![chat; 64]).collect();
        let (mut hits, mut tokens, mut blocks) = (0, 0, Vec::new());
        for sequence in 0..2000 {
            let chat = random.usize(..chats.len());
            chats[chat].extend((0..32).map(|_| random.u32(..1000)));
            if chats[chat].len() > 1000 {
                chats[chat].truncate(64);
            }
            blocks.clear();
            block_hashes(&chats[chat], 16, &mut blocks);
            let prompt = Prompt { tokens: chats[chat].len() as u64, blocks: &blocks, ..Prompt::default() };
            let decision = router.decide(policy.as_ref(), &prompt, sequence, None, &mut scratch).unwrap();
            let mut cached = [0; 4];
            router.prefixes().unwrap().cached(&blocks, &mut cached);
            hits += cached[usize::from(decision.choice.rank)];
            tokens += prompt.tokens;
            router.assign(&decision, &blocks, true);
            router.accounts().release(decision.choice.rank, decision.work);
        }
        hits as f64 / tokens as f64
    };
    let (prefix, affinity, random) = (hit_share("prefix"), hit_share("affinity"), hit_share("random"));
    assert!(prefix > 0.85 && prefix > random + 0.05, "prefix {prefix}, random {random}");
    assert!((affinity - prefix).abs() < 1e-12, "without shares affinity is prefix: {affinity}, {prefix}");
}
