//! Keys and values: every page arrives complete, prefixes are stored once, sequences are balanced; and rejections.

use std::collections::BTreeMap;

use proptest::prelude::*;
use semmoe_kernels::reshard::kv::{Balance, KvError, KvMove, KvPage, KvPlan, KvPool, KvSequence, KvShape};

use crate::sim::Random;

const LAYERS: usize = 3;
const HEAD_BYTES: usize = 5;
/// Tokens per page.
const TOKENS: usize = 2;

/// A rank's pool while sequences start and end.
#[derive(Default)]
struct Builder {
    pool: KvPool,
    known: BTreeMap<(Option<u32>, Vec<u32>), u32>,
    holders: Vec<usize>,
}

impl Builder {
    fn page(&mut self, before: Option<u32>, tokens: &[u32]) -> u32 {
        let sealed = tokens.len() == TOKENS;
        if let Some(&page) = self.known.get(&(before, tokens.to_vec())).filter(|_| sealed) {
            self.pool.idle.retain(|&idle| idle != page);
            self.holders[page as usize] += 1;
            return page;
        }
        let page = self.pool.pages.len() as u32;
        self.pool.pages.push(KvPage { before, tokens: tokens.to_vec(), sealed });
        self.holders.push(1);
        if sealed {
            self.known.insert((before, tokens.to_vec()), page);
        }
        page
    }

    fn begin(&mut self, id: u64, tokens: &[u32], promised: usize, shares: &[f32]) {
        let mut pages: Vec<u32> = Vec::new();
        for tokens in tokens.chunks(TOKENS) {
            let page = self.page(pages.last().copied(), tokens);
            pages.push(page);
        }
        self.pool.sequences.push(KvSequence { id, pages, promised, shares: shares.to_vec() });
    }

    /// Ends the last sequence, which releases its last page first.
    fn end(&mut self) {
        let sequence = self.pool.sequences.pop().unwrap();
        for &page in sequence.pages.iter().rev() {
            self.holders[page as usize] -= 1;
            if self.holders[page as usize] == 0 {
                self.pool.idle.push(page);
            }
        }
    }
}

/// Sequences over a few tokens, so that prefixes are shared; those that end have only full pages.
fn pool(first_id: u64, ranks: usize, random: &mut Random) -> KvPool {
    let mut builder = Builder::default();
    for id in first_id..first_id + random.below(6) as u64 {
        let ends = random.below(3) == 0;
        let pages = random.below(5);
        let count = if ends { pages * TOKENS } else { pages * TOKENS + random.below(TOKENS) };
        let tokens: Vec<u32> = (0..count).map(|_| random.below(2) as u32).collect();
        let shares: Vec<f32> = (0..ranks).map(|_| random.below(4) as f32 / 4.0).collect();
        builder.begin(id, &tokens, random.below(3), if random.below(4) == 0 { &[] } else { &shares });
        if ends {
            builder.end();
        }
    }
    builder.pool
}

/// All tokens up to a page's end.
fn chain(pool: &KvPool, page: u32) -> Vec<u32> {
    let page = &pool.pages[page as usize];
    let mut tokens = page.before.map_or_else(Vec::new, |before| chain(pool, before));
    tokens.extend(&page.tokens);
    tokens
}

/// A page's content: its tokens and those before it.
fn bytes(pool: &KvPool, page: u32, heads: std::ops::Range<usize>) -> Vec<u8> {
    let mut hash =
        chain(pool, page).iter().fold(9, |hash: u64, &token| (hash ^ u64::from(token)).wrapping_mul(0x100_0000_01b3));
    hash ^= hash >> 29;
    let places = (0..LAYERS).flat_map(|layer| heads.clone().map(move |head| (layer, head)));
    places
        .flat_map(|(layer, head)| {
            (0..HEAD_BYTES).map(move |byte| (hash >> (byte * 7)) as u8 ^ (layer * 16 + head) as u8)
        })
        .collect()
}

/// Ranks of a group before a switch, and after it.
#[derive(Clone, Copy)]
struct Widths {
    before: usize,
    after: usize,
}

/// Checks that the moves fill every new page of every rank, each byte exactly once.
fn assert_filled(shape: &KvShape, plan: &KvPlan, pools: &[KvPool], Widths { before, after }: Widths) {
    let mut moves = Vec::new();
    for rank in 0..shape.ranks() {
        let planned = plan.pool(rank);
        let new = shape.heads_in(after, rank);
        let mut pages = vec![vec![None; shape.page_bytes(&new)]; planned.pool.pages.len()];
        plan.moves(rank, &mut moves);
        for moved in &moves {
            let held = shape.heads_in(before, moved.from.rank);
            let source = bytes(&pools[moved.from.rank / before], moved.from.page, held);
            for row in 0..moved.rows {
                for byte in 0..moved.bytes {
                    let to = &mut pages[moved.page as usize][moved.to_offset + row * moved.to_stride + byte];
                    assert_eq!(*to, None, "written twice by {moved:?}");
                    *to = Some(source[moved.from_offset + row * moved.from_stride + byte]);
                }
            }
        }
        for (page, found) in pages.into_iter().enumerate() {
            let expected: Vec<Option<u8>> =
                bytes(&planned.pool, page as u32, new.clone()).into_iter().map(Some).collect();
            assert_eq!(found, expected, "page {page} of rank {rank}");
        }
    }
}

/// (id, tokens, promised) of all sequences, by id.
fn sequences<'a>(pools: impl Iterator<Item = &'a KvPool>) -> Vec<(u64, Vec<u32>, usize)> {
    let tokens =
        |pool: &KvPool, sequence: &KvSequence| sequence.pages.last().map_or_else(Vec::new, |&last| chain(pool, last));
    let mut all: Vec<_> = pools
        .flat_map(|pool| {
            pool.sequences.iter().map(move |sequence| (sequence.id, tokens(pool, sequence), sequence.promised))
        })
        .collect();
    all.sort();
    all
}

/// Heads, ranks, and ranks of a group.
fn grouped_shapes() -> impl Strategy<Value = (usize, usize, usize)> {
    prop::sample::select(vec![(1, 4, 2), (4, 4, 2), (2, 4, 2), (2, 8, 4), (8, 8, 2), (6, 6, 3), (6, 6, 2)])
}

fn shapes() -> impl Strategy<Value = (KvShape, usize)> {
    let grouped = prop::sample::select(vec![(1usize, 1usize), (4, 1), (4, 2), (4, 4), (2, 4), (1, 3), (2, 8), (6, 3)]);
    (grouped, any::<bool>()).prop_map(|((heads, ranks), latent)| match latent {
        true => (KvShape::latent(LAYERS, HEAD_BYTES, ranks).unwrap(), 1),
        false => (KvShape::grouped(LAYERS, heads, HEAD_BYTES, ranks).unwrap(), heads),
    })
}

fn whole_heads(shape: &KvShape) -> usize {
    (0..shape.ranks()).map(|rank| shape.heads_of(rank).end).max().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 200, ..ProptestConfig::default() })]

    /// DP -> TP -> DP: nothing is lost, prefixes are stored once, and the result is a pool that any rank accepts.
    #[test]
    fn pages_and_sequences_arrive((shape, heads) in shapes(), seed: u64, slack in 0usize..4) {
        prop_assert_eq!(whole_heads(&shape), heads);
        let (mut random, ranks) = (Random(seed), shape.ranks());
        let pools: Vec<KvPool> = (0..ranks).map(|rank| pool(rank as u64 * 100, ranks, &mut random)).collect();
        let tp = KvPlan::gather(shape, &pools, 1000).unwrap();
        assert_filled(&shape, &tp, &pools, Widths { before: 1, after: ranks });
        let union = &tp.pool(0).pool;
        prop_assert_eq!(sequences([union].into_iter()), sequences(pools.iter()));
        let mut sealed: Vec<_> = (0..union.pages.len() as u32).filter(|&page| union.pages[page as usize].sealed).map(|page| chain(union, page)).collect();
        let distinct: std::collections::BTreeSet<_> = pools
            .iter()
            .flat_map(|pool| (0..pool.pages.len() as u32).filter(|&page| pool.pages[page as usize].sealed).map(|page| chain(pool, page)))
            .collect();
        sealed.sort();
        prop_assert_eq!(sealed, distinct.into_iter().collect::<Vec<_>>());

        // No more idle pages than fit; the youngest stay.
        let held = union.pages.len() - union.idle.len();
        let promised: usize = union.sequences.iter().map(|sequence| sequence.promised).sum();
        let tight = KvPlan::gather(shape, &pools, held + promised + 1).unwrap();
        let kept = tight.pool(0).pool.idle.len();
        prop_assert_eq!(kept, union.idle.len().min(promised + 1));
        let youngest: Vec<_> = union.idle[union.idle.len() - kept..].iter().map(|&page| chain(union, page)).collect();
        let stayed: Vec<_> = tight.pool(0).pool.idle.iter().map(|&page| chain(&tight.pool(0).pool, page)).collect();
        prop_assert_eq!(stayed, youngest);
        if held + promised > 0 {
            let (pages, capacity) = (held + promised, held + promised - 1);
            prop_assert_eq!(KvPlan::gather(shape, &pools, capacity), Err(KvError::NoRoom { pages, capacity }));
        }

        let dp = KvPlan::scatter(shape, union, Balance { capacity: 1000, full: 1000, slack }).unwrap();
        assert_filled(&shape, &dp, std::slice::from_ref(union), Widths { before: ranks, after: 1 });
        let after: Vec<KvPool> = (0..ranks).map(|rank| dp.pool(rank).pool.clone()).collect();
        prop_assert_eq!(sequences(after.iter()), sequences(pools.iter()));
        let back = KvPlan::gather(shape, &after, 1000).unwrap();
        prop_assert_eq!(sequences([&back.pool(0).pool].into_iter()), sequences(pools.iter()));
        prop_assert_eq!(back.pool(0).pool.pages.len(), union.pages.len());
        // Equal input, equal plan.
        let again = KvPlan::scatter(shape, union, Balance { capacity: 1000, full: 1000, slack }).unwrap();
        prop_assert_eq!(again.digest(), dp.digest());
        prop_assert!(union.pages.is_empty() || ranks == 1 || tp.digest() != dp.digest());
    }

    /// DP -> groups -> TP -> groups -> DP: every page arrives with the heads of its rank.
    #[test]
    fn groups_merge_and_split((heads, ranks, width) in grouped_shapes(), latent: bool, seed: u64) {
        let shape = |ranks| match latent {
            true => KvShape::latent(LAYERS, HEAD_BYTES, ranks).unwrap(),
            false => KvShape::grouped(LAYERS, heads, HEAD_BYTES, ranks).unwrap(),
        };
        let (inside, all, groups) = (shape(width), shape(ranks), ranks / width);
        let mut random = Random(seed);
        let pools: Vec<KvPool> = (0..ranks).map(|rank| pool(rank as u64 * 100, 0, &mut random)).collect();
        let expected = sequences(pools.iter());
        let gathered = pools.chunks(width).map(|pools| {
            let plan = KvPlan::gather(inside, pools, 1000).unwrap();
            assert_filled(&inside, &plan, pools, Widths { before: 1, after: width });
            plan.pool(0).pool.clone()
        });
        let gathered: Vec<KvPool> = gathered.collect();
        let merged = KvPlan::merge(all, width, &gathered, 1000).unwrap();
        assert_filled(&all, &merged, &gathered, Widths { before: width, after: ranks });
        let union = merged.pool(0).pool.clone();
        prop_assert_eq!(sequences([&union].into_iter()), expected.clone());
        let split = KvPlan::split(all, width, &union, Balance { capacity: 1000, full: 1000, slack: 0 }).unwrap();
        assert_filled(&all, &split, std::slice::from_ref(&union), Widths { before: ranks, after: width });
        let apart: Vec<KvPool> = split.pools().iter().map(|pool| pool.pool.clone()).collect();
        prop_assert_eq!((apart.len(), sequences(apart.iter())), (groups, expected.clone()));
        let scattered = apart.iter().flat_map(|pool| {
            let plan = KvPlan::scatter(inside, pool, Balance { capacity: 1000, full: 1000, slack: 0 }).unwrap();
            assert_filled(&inside, &plan, std::slice::from_ref(pool), Widths { before: width, after: 1 });
            plan.pools().iter().map(|pool| pool.pool.clone()).collect::<Vec<_>>()
        });
        prop_assert_eq!(sequences(scattered.collect::<Vec<_>>().iter()), expected);
    }

    /// Longest first: no rank has more than the least loaded one plus the longest sequence, if nothing is shared.
    #[test]
    fn ranks_get_equally_many_pages(lengths in prop::collection::vec(1usize..20, 1..40), ranks in 1usize..=8) {
        let shape = KvShape::grouped(1, 1, 1, ranks).unwrap();
        let mut builder = Builder::default();
        for (id, &length) in lengths.iter().enumerate() {
            let tokens: Vec<u32> = (0..length * TOKENS).map(|at| (id * 1000 + at) as u32).collect();
            builder.begin(id as u64, &tokens, 1, &[]);
        }
        let plan = KvPlan::scatter(shape, &builder.pool, Balance { capacity: 1000, full: 1000, slack: 0 }).unwrap();
        let load = |rank: usize| plan.pool(rank).pool.pages.len() + plan.pool(rank).pool.sequences.len();
        let (least, most) = ((0..ranks).map(load).min().unwrap(), (0..ranks).map(load).max().unwrap());
        let longest = lengths.iter().max().unwrap() + 1;
        prop_assert!(most <= least + longest);
    }
}

/// Qwen3-235B-A22B: 94 layers, 4 heads of 128 in bf16, 8 ranks, for one token.
#[test]
fn bytes_of_a_known_model() {
    let shape = KvShape::grouped(94, 4, 2 * 128 * 2, 8).unwrap();
    assert_eq!((shape.page_bytes(&(0..4)), shape.page_bytes(&shape.heads_of(5))), (192_512, 48_128));
    let mut builder = Builder::default();
    builder.begin(1, &[7], 0, &[]);
    let mut pools = vec![KvPool::default(); 8];
    pools[3] = builder.pool;
    let tp = KvPlan::gather(shape, &pools, 10).unwrap();
    let dp = KvPlan::scatter(shape, &tp.pool(0).pool, Balance { capacity: 10, full: 10, slack: 0 }).unwrap();
    let between = |plan: &KvPlan| -> usize {
        let mut moves: Vec<KvMove> = Vec::new();
        let mut bytes = 0;
        for rank in 0..8 {
            plan.moves(rank, &mut moves);
            bytes += moves.iter().filter(|m| m.from.rank != rank).map(|m| m.rows * m.bytes).sum::<usize>();
        }
        bytes
    };
    assert_eq!((between(&tp), between(&dp)), (336_896, 144_384));
}

/// The ranks of sequences 0, 1, ...
fn homes(shape: KvShape, pool: &KvPool, slack: usize) -> Vec<usize> {
    let plan = KvPlan::scatter(shape, pool, Balance { capacity: 100, full: 100, slack }).unwrap();
    let home =
        |id: u64| (0..shape.ranks()).find(|&rank| plan.pool(rank).pool.sequences.iter().any(|s| s.id == id)).unwrap();
    (0..pool.sequences.len() as u64).map(home).collect()
}

#[test]
fn prefixes_stay_together_and_ties_go_by_the_tables() {
    let shape = KvShape::grouped(1, 2, 1, 2).unwrap();
    let with = |requests: &[(&[u32], [f32; 2])]| {
        let mut builder = Builder::default();
        for (id, (tokens, shares)) in requests.iter().enumerate() {
            builder.begin(id as u64, tokens, 0, shares);
        }
        builder.pool
    };
    // 6 pages; 5 pages, 4 of them shared with the first; 3 pages of its own. The second needs 1 page on the first's
    // rank, 5 elsewhere; load 7 against 5 still sends it elsewhere, but behind a load of 3 it stays.
    let long: Vec<u32> = (0..12).collect();
    let near: Vec<u32> = (0..8).chain([90, 91]).collect();
    let pool = with(&[(&long, [0.0, 0.0]), (&near, [0.0, 0.0])]);
    assert_eq!(homes(shape, &pool, 0), [0, 1]);
    assert_eq!(homes(shape, &with(&[(&long, [0.9, 0.1]), (&near, [0.9, 0.1])]), 2), [0, 0], "within the slack");
    let other: Vec<u32> = (100..112).collect();
    let pool = with(&[(&long, [0.0; 2]), (&other, [0.0; 2]), (&near, [0.0; 2])]);
    assert_eq!(homes(shape, &pool, 0), [0, 1, 0], "the prefix is there already");
    // Equal loads: T decides.
    let pool = with(&[(&long, [0.2, 0.8]), (&other, [0.1, 0.9])]);
    assert_eq!(homes(shape, &pool, 0), [1, 0]);
    assert_eq!(homes(shape, &pool, 6), [1, 1]);
}

/// Sequences fill a rank up to `full`; idle pages may use all of the rest.
#[test]
fn idle_pages_stay_beyond_what_sequences_may_fill() {
    let page = |token| KvPage { before: None, tokens: vec![token; TOKENS], sealed: true };
    let sequence = KvSequence { id: 7, pages: vec![0], promised: 1, shares: Vec::new() };
    let shape = KvShape::grouped(1, 2, 1, 2).unwrap();
    let pool = KvPool { pages: (0..6).map(page).collect(), sequences: vec![sequence], idle: (1..6).collect() };
    let kept = |capacity, full| {
        let plan = KvPlan::scatter(shape, &pool, Balance { capacity, full, slack: 0 }).unwrap();
        (0..2).map(|rank| plan.pool(rank).pool.idle.len()).sum::<usize>()
    };
    assert_eq!((kept(9, 2), kept(3, 2), kept(2, 2)), (5, 5, 3));
    let idle = KvPool { sequences: Vec::new(), idle: (0..6).collect(), ..pool.clone() };
    let plan = KvPlan::scatter(shape, &idle, Balance { capacity: 9, full: 0, slack: 0 }).unwrap();
    assert_eq!((0..2).map(|rank| plan.pool(rank).pool.idle.len()).sum::<usize>(), 6, "nothing runs");
}

#[test]
fn what_cannot_be_is_refused() {
    let page = |before, sealed| KvPage { before, tokens: vec![1; TOKENS], sealed };
    let sequence = |pages: &[u32]| KvSequence { id: 7, pages: pages.to_vec(), promised: 1, shares: Vec::new() };
    let shape = KvShape::grouped(1, 1, 1, 1).unwrap();
    let good =
        KvPool { pages: vec![page(None, true), page(Some(0), true)], sequences: vec![sequence(&[0])], idle: vec![1] };
    let change = |change: &dyn Fn(&mut KvPool)| {
        let mut pool = good.clone();
        change(&mut pool);
        KvPlan::scatter(shape, &pool, Balance { capacity: 9, full: 9, slack: 0 }).unwrap_err().to_string()
    };
    assert!(KvPlan::scatter(shape, &good, Balance { capacity: 9, full: 9, slack: 0 }).is_ok());
    for (found, expected) in [
        (change(&|p| p.pages[1].before = Some(1)), "pool 0: page 1 follows a page that does not precede it"),
        (change(&|p| p.pages[0].sealed = false), "pool 0: page 1 is sealed, but follows an unsealed page"),
        (change(&|p| p.pages[1].tokens.clear()), "pool 0: page 1 has no tokens"),
        (change(&|p| p.sequences[0].pages = vec![1]), "pool 0: sequence 0 has pages that do not form a chain"),
        (change(&|p| p.sequences[0].pages = vec![9]), "pool 0: sequence 0 has pages that do not form a chain"),
        (
            change(&|p| p.sequences[0].shares = vec![f32::NAN]),
            "pool 0: sequence 0 does not have one finite share per rank",
        ),
        (
            change(&|p| p.sequences[0].shares = vec![0.5; 2]),
            "pool 0: sequence 0 does not have one finite share per rank",
        ),
        (change(&|p| p.idle = vec![1, 1]), "pool 0: idle page 1 is in use, listed twice, or out of range"),
        (change(&|p| p.idle = vec![0, 1]), "pool 0: idle page 0 is in use, listed twice, or out of range"),
        (change(&|p| p.idle = vec![9]), "pool 0: idle page 0 is in use, listed twice, or out of range"),
        (change(&|p| p.idle.clear()), "pool 0: page 1 is neither in use nor idle, or is shared but unsealed"),
        (
            change(&|p| p.pages[1].sealed = false),
            "pool 0: idle page 0 is unsealed, or is evicted after the page before it",
        ),
        (
            change(&|p| {
                p.sequences.clear();
                p.idle = vec![0, 1];
            }),
            "pool 0: idle page 1 is unsealed, or is evicted after the page before it",
        ),
        (
            change(&|p| {
                p.pages[1].sealed = false;
                p.idle.clear();
                p.sequences = vec![sequence(&[0, 1]), sequence(&[0, 1])];
            }),
            "pool 0: page 1 is neither in use nor idle, or is shared but unsealed",
        ),
    ] {
        assert_eq!(found, expected);
    }
    let full = KvPlan::scatter(shape, &good, Balance { capacity: 1, full: 1, slack: 0 }).unwrap_err();
    assert_eq!(full.to_string(), "no rank has room for sequence 7 with 2 pages; the limit per rank is 1");
    let pools = KvPlan::gather(shape, &[good.clone(), good], 9).unwrap_err();
    assert_eq!(pools.to_string(), "2 pools, expected 1: one per rank or group");
}

#[test]
fn groups_and_heads_that_do_not_divide_are_refused() {
    let groups = KvPlan::split(
        KvShape::grouped(1, 4, 1, 4).unwrap(),
        3,
        &KvPool::default(),
        Balance { capacity: 1, full: 1, slack: 0 },
    )
    .unwrap_err();
    assert_eq!(groups.to_string(), "groups of 3 ranks do not fit 4 ranks with 4 KV heads");
    let groups = KvPlan::merge(KvShape::grouped(1, 6, 1, 12).unwrap(), 4, &[], 9).unwrap_err();
    assert_eq!(groups.to_string(), "groups of 4 ranks do not fit 12 ranks with 6 KV heads");
    let heads = KvShape::grouped(1, 3, 1, 2).unwrap_err().to_string();
    assert_eq!(heads, "2 ranks can neither split nor replicate 3 KV heads evenly");
    assert!(
        KvShape::latent(0, 1, 1).is_err()
            && KvShape::latent(1, 1, 0).is_err()
            && KvShape::grouped(1, 2, usize::MAX, 1).is_err()
    );
}
