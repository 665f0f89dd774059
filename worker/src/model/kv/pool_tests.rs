//! Laws of the pool: pages always add up, and what is found again is what was stored.

use proptest::prelude::*;

use super::*;
use crate::model::kv::PAGE_TOKENS;
use crate::model::kv::pages::PageId;

const SHAPE: CacheShape =
    CacheShape { layers: 2, kv_heads: 1, key_width: 3, value_width: 2, max_positions: 64 * PAGE_TOKENS };
const LAYERS: usize = SHAPE.layers;

/// A number that identifies a token, its position, and the tokens before it.
fn mark(tokens: &[u32], position: usize) -> f32 {
    tokens[..=position].iter().fold(17_u32, |hash, token| hash.wrapping_mul(31).wrapping_add(*token) % 1_000_003) as f32
}

/// Grows the sequence to `until` tokens as a model would.
fn compute(cache: &mut KvCache, tokens: &[u32], until: usize) {
    let from = cache.len();
    if until <= from {
        return;
    }
    assert!(cache.reserve(until - from), "a promised page is there");
    let mut routes = Vec::new();
    for position in from..until {
        let value = mark(tokens, position);
        for layer in 0..LAYERS {
            cache.write(layer, 0, position, &[value + layer as f32; 3], &[-value; 2]);
        }
        routes.extend([value as u16, position as u16]);
    }
    cache.commit(&tokens[from..until], &routes);
}

/// The cache contains exactly what this sequence's tokens determine.
fn check(cache: &KvCache, tokens: &[u32]) {
    let mut seen = 0;
    for (first, held, page) in cache.pages(cache.len()) {
        for at in 0..held {
            let value = mark(tokens, first + at);
            for layer in 0..LAYERS {
                let key = page.keys(&SHAPE, layer, 0)[at];
                assert_eq!(key, value + layer as f32);
                assert_eq!(page.values(&SHAPE, layer, 0)[at * SHAPE.value_stride()], -value);
            }
            seen += 1;
        }
    }
    assert_eq!(seen, cache.len());
    let routes = cache.routes(0);
    assert_eq!(routes.len(), 2 * cache.len());
    for (position, route) in routes.chunks(2).enumerate() {
        assert_eq!(route, [mark(tokens, position) as u16, position as u16]);
    }
    assert_eq!(cache.routes(cache.len() / 2)[..], routes[cache.len() / 2 * 2..]);
}

fn tokens(family: u32, length: usize) -> Vec<u32> {
    // Families diverge after some pages, so prefixes are partly shared.
    (0..length as u32).map(|i| if i < 100 * (family % 3) { i % 7 } else { i % 7 + family }).collect()
}

#[derive(Clone, Debug)]
enum Act {
    Admit { family: u32, prompt: usize, new: usize },
    Compute { which: usize, count: usize },
    Drop { which: usize },
    Flush,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => (0..4_u32, 1..400_usize, 1..200_usize).prop_map(|(family, prompt, new)| Act::Admit { family, prompt, new }),
        6 => (0..8_usize, 1..150_usize).prop_map(|(which, count)| Act::Compute { which, count }),
        2 => (0..8_usize).prop_map(|which| Act::Drop { which }),
        1 => Just(Act::Flush),
    ]
}

struct Running {
    cache: KvCache,
    tokens: Vec<u32>,
}

/// Used pages are exactly those that sequences hold, promises are kept, and the capacity is not exceeded.
fn laws(pool: &KvPool, running: &[Running]) {
    let usage = pool.usage();
    let mut held: Vec<PageId> = Vec::new();
    let mut promised = 0;
    for Running { cache, tokens } in running {
        held.extend(cache.held().map(|(page, _)| page));
        promised += tokens.len().div_ceil(PAGE_TOKENS) - cache.held().count();
    }
    held.sort_unstable();
    held.dedup();
    assert_eq!((usage.used, usage.promised), (held.len() as u64, promised as u64));
    assert!(usage.used + usage.cached <= usage.capacity && usage.used + usage.promised <= usage.capacity, "{usage:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn pages_add_up_after_anything(acts in prop::collection::vec(act(), 1..80), capacity in 10..40_usize, reuse: bool) {
        let pool = KvPool::new(SHAPE, capacity, reuse);
        let mut running: Vec<Running> = Vec::new();
        for act in acts {
            match act {
                Act::Admit { family, prompt, new } => {
                    let tokens = tokens(family, prompt + new);
                    let before = pool.usage();
                    match pool.admit(&tokens[..prompt], tokens.len()) {
                        Some(cache) => {
                            prop_assert!(cache.len() < prompt && (reuse || cache.is_empty()));
                            check(&cache, &tokens);
                            running.push(Running { cache, tokens });
                        }
                        None => {
                            prop_assert!(before.used + before.promised > 0 || tokens.len() > capacity * PAGE_TOKENS);
                            prop_assert_eq!(pool.usage(), before);
                        }
                    }
                }
                Act::Compute { which, count } => {
                    let of = running.len().max(1);
                    if let Some(Running { cache, tokens }) = running.get_mut(which % of) {
                        let until = (cache.len() + count).min(tokens.len());
                        compute(cache, tokens, until);
                    }
                }
                Act::Drop { which } => {
                    if which < running.len() {
                        running.swap_remove(which);
                    }
                }
                Act::Flush => drop(pool.flush()),
            }
            laws(&pool, &running);
        }
        // An admitted sequence can always finish, whatever else is running.
        for Running { cache, tokens } in &mut running {
            compute(cache, tokens, tokens.len());
            check(cache, tokens);
        }
        laws(&pool, &running);
        running.clear();
        let usage = pool.usage();
        prop_assert_eq!((usage.used, usage.promised), (0, 0));
        pool.flush();
        prop_assert_eq!(pool.usage().cached, 0);
    }
}

#[test]
fn the_longest_known_prefix_is_shared_and_the_oldest_page_goes_first() {
    let pool = KvPool::new(SHAPE, 6, true);
    let long = tokens(0, 3 * PAGE_TOKENS);
    let mut first = pool.admit(&long, long.len()).unwrap();
    compute(&mut first, &long, long.len());
    // While it runs, another shares its full pages, but computes at least one token of its prompt.
    let second = pool.admit(&long, long.len()).unwrap();
    assert_eq!((second.len(), pool.usage().used), (2 * PAGE_TOKENS, 3));
    drop((first, second));
    assert_eq!((pool.usage().used, pool.usage().cached), (0, 3));

    // Another prompt needs four pages: the first one's last page is evicted, its beginning stays.
    let other: Vec<u32> = long.iter().map(|token| token + 50).chain(0..64).collect();
    let mut cache = pool.admit(&other, other.len()).unwrap();
    compute(&mut cache, &other, other.len());
    assert_eq!((pool.usage().evicted, pool.usage().cached), (1, 2));
    assert!(pool.admit(&other[1..], 3 * PAGE_TOKENS).is_none(), "two pages are left");
    assert_eq!(pool.admit(&long, 3 * PAGE_TOKENS - 1).map(|cache| cache.len()), None, "nor are there three");
    drop(cache);
    assert_eq!(pool.admit(&long, long.len()).unwrap().len(), 2 * PAGE_TOKENS);
}

#[test]
fn equal_pages_computed_side_by_side_become_one() {
    let pool = KvPool::new(SHAPE, 8, true);
    let prompt = tokens(0, 2 * PAGE_TOKENS + 1);
    let mut caches: Vec<KvCache> = (0..2).map(|_| pool.admit(&prompt, prompt.len()).unwrap()).collect();
    for cache in &mut caches {
        compute(cache, &prompt, prompt.len());
        check(cache, &prompt);
    }
    assert_eq!(pool.usage().used, 4, "two full pages shared, one of its own for each");
}

#[test]
fn a_sequence_of_its_own_takes_no_promised_page_and_can_be_cut() {
    let pool = KvPool::new(SHAPE, 3, true);
    let prompt = tokens(1, 2 * PAGE_TOKENS);
    let promised = pool.admit(&prompt, prompt.len()).unwrap();
    let mut alone = pool.alone();
    compute(&mut alone, &prompt, PAGE_TOKENS);
    assert!(!alone.reserve(1), "the last two pages are promised");
    drop(promised);
    compute(&mut alone, &prompt, 2 * PAGE_TOKENS);
    alone.truncate(PAGE_TOKENS + 3);
    check(&alone, &prompt);
    compute(&mut alone, &prompt, PAGE_TOKENS + 9);
    check(&alone, &prompt);
    alone.truncate(0);
    assert_eq!(pool.usage().used, 0);
}
