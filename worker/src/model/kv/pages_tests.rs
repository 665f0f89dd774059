//! Laws of the bookkeeping, without memory: after any actions of sequences, pages add up, and a prefix is found if and
//! only if it is known.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

/// The tokens of a page and of its predecessors.
fn path(pages: &Pages, id: PageId) -> Vec<u32> {
    let content = &pages.sealed[id as usize].as_ref().expect("a page before a known one is known").content;
    let mut tokens = content.before.map_or_else(Vec::new, |before| path(pages, before));
    tokens.extend_from_slice(&content.tokens);
    tokens
}

fn laws(pages: &Pages, chains: &[(Chain, Vec<u32>)]) {
    let held: BTreeSet<PageId> = chains.iter().flat_map(|(chain, _)| chain.pages.iter().copied()).collect();
    let promised: usize = chains.iter().filter_map(|(chain, _)| chain.promised).sum();
    assert_eq!((pages.used, pages.promised), (held.len(), promised));
    assert!(pages.used + pages.idle.len() <= pages.capacity && pages.used + pages.promised <= pages.capacity);
    // Every id is in exactly one state, and known pages are found by their own content.
    let idle: BTreeSet<PageId> = pages.idle.values().copied().collect();
    let free: BTreeSet<PageId> = pages.free.iter().copied().collect();
    assert_eq!(held.len() + idle.len() + free.len(), pages.sealed.len());
    assert!(held.is_disjoint(&idle) && held.is_disjoint(&free) && idle.is_disjoint(&free));
    assert_eq!(pages.index.len(), pages.sealed.iter().flatten().count());
    for (content, &id) in &pages.index {
        assert_eq!(&pages.known(id).content, content);
        let holders = chains.iter().filter(|(chain, _)| chain.pages.contains(&id)).count();
        assert_eq!(pages.known(id).holders, holders);
        path(pages, id);
    }
    // A sequence's known pages hold its own tokens; all its other pages belong only to it.
    for (chain, _) in chains {
        for (at, &id) in chain.pages.iter().enumerate() {
            match &pages.sealed[id as usize] {
                Some(_) => assert_eq!(path(pages, id), chain.tokens[..(at + 1) * PAGE_TOKENS]),
                None => {
                    assert_eq!(
                        chains.iter().flat_map(|(chain, _)| &chain.pages).filter(|other| **other == id).count(),
                        1
                    )
                }
            }
        }
    }
}

/// Grows the sequence to `until` tokens.
fn grow(pages: &mut Pages, (chain, tokens): &mut (Chain, Vec<u32>), until: usize) {
    while chain.pages.len() < until.div_ceil(PAGE_TOKENS) {
        pages.take(chain).expect("a promised page is there");
    }
    for &token in &tokens[chain.tokens.len()..until] {
        chain.tokens.push(token);
        if chain.tokens.len().is_multiple_of(PAGE_TOKENS) {
            let last = chain.tokens.len() / PAGE_TOKENS - 1;
            let own = chain.pages[last];
            match pages.seal(chain, last) {
                Seal::Duplicate { known } => assert_eq!((chain.pages[last], pages.free.last()), (known, Some(&own))),
                Seal::Own | Seal::Known => assert_eq!(chain.pages[last], own),
            }
        }
    }
}

fn drop_all(pages: &mut Pages, mut chain: Chain) {
    while !chain.pages.is_empty() {
        pages.release_last(&mut chain);
    }
    pages.renounce(&mut chain);
}

/// Families diverge at different pages.
fn text(family: u32, length: usize) -> Vec<u32> {
    (0..length as u32).map(|at| at % 5 + if at < 64 * (family % 4) { 0 } else { family }).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn pages_add_up_and_prefixes_are_found_exactly(
        acts in prop::collection::vec((0..8_u8, 0..6_u32, 1..300_usize), 1..60),
        capacity in 4..24_usize,
        reuse: bool,
    ) {
        let mut pages = Pages::new(capacity, reuse);
        let mut chains: Vec<(Chain, Vec<u32>)> = Vec::new();
        for (act, which, size) in acts {
            let at = which as usize % chains.len().max(1);
            match act {
                0..3 => {
                    let tokens = text(which, size + 70);
                    let known: BTreeSet<Vec<u32>> = pages.index.values().map(|&id| path(&pages, id)).collect();
                    let longest = (0..=(size - 1) / PAGE_TOKENS).rev().find(|full| *full == 0 || known.contains(&tokens[..full * PAGE_TOKENS]));
                    let room = pages.usage();
                    match pages.admit(&tokens[..size], tokens.len()) {
                        Some(chain) => {
                            prop_assert_eq!(Some(chain.pages.len()), longest);
                            prop_assert_eq!(chain.tokens.len(), chain.pages.len() * PAGE_TOKENS);
                            chains.push((chain, tokens));
                        }
                        None => prop_assert_eq!(pages.usage(), room),
                    }
                }
                3..6 if !chains.is_empty() => {
                    let until = (chains[at].0.tokens.len() + size).min(chains[at].1.len());
                    grow(&mut pages, &mut chains[at], until);
                }
                6 if !chains.is_empty() => drop_all(&mut pages, chains.swap_remove(at).0),
                7 if which == 0 => drop(pages.flush()),
                _ => {}
            }
            laws(&pages, &chains);
        }
        for chain in &mut chains {
            let until = chain.1.len();
            grow(&mut pages, chain, until);
        }
        laws(&pages, &chains);
        chains.drain(..).for_each(|(chain, _)| drop_all(&mut pages, chain));
        laws(&pages, &[]);
        pages.flush();
        prop_assert_eq!((pages.usage().cached, pages.index.len()), (0, 0));
    }
}
