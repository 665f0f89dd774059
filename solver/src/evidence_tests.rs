#![allow(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;
use semmoe_tables::{Attention, Provenance};

use super::{LayerEvidence, Shrinkage};
use crate::options::{SolveOptions, UnseenTokens};
use crate::similar::{Neighbours, TokenStrings, most_similar};

const GROUPS: usize = 3;

fn options() -> SolveOptions {
    let provenance = Provenance { source: "test".into(), created: "2026-01-01T00:00:00Z".into() };
    SolveOptions::new(GROUPS as u16, Attention::Tp, provenance)
}

fn evidence(counts: &[[u32; GROUPS]]) -> LayerEvidence {
    let all: f64 = counts.iter().flatten().map(|&count| f64::from(count)).sum();
    let total = |group: usize| counts.iter().map(|row| f64::from(row[group])).sum::<f64>();
    let share = (0..GROUPS).map(|group| if all == 0.0 { 1.0 / GROUPS as f64 } else { total(group) / all });
    let on_group = counts.iter().flatten().map(|&count| f64::from(count)).collect();
    LayerEvidence::new(on_group, GROUPS, share.collect())
}

fn neighbours(words: &[&str], counts: &[[u32; GROUPS]], options: &SolveOptions) -> Neighbours {
    let strings = TokenStrings::new(words.iter().map(|&word| word.to_owned()).collect(), None);
    let seen: Vec<u64> = counts.iter().map(|row| row.iter().map(|&count| u64::from(count)).sum()).collect();
    most_similar(&strings, &seen, &options.similarity, 1)
}

fn shares(words: &[&str], counts: &[[u32; GROUPS]], options: &SolveOptions, token: usize) -> Option<[f64; GROUPS]> {
    let neighbours = neighbours(words, counts, options);
    let mut shares = [0.0; GROUPS];
    Shrinkage::new(options, Some(&neighbours)).shares(&evidence(counts), token, &mut shares).then_some(shares)
}

fn close(a: [f64; GROUPS], b: [f64; GROUPS]) -> bool {
    a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-9)
}

#[test]
fn an_unseen_token_has_its_neighbours_shares() {
    let mut options = options();
    options.similarity.layer_occurrences = 1e-6;
    let (words, counts) = (["walk", "walks", "zzz"], [[0, 0, 0], [1, 3, 0], [0, 0, 900]]);
    let found = shares(&words, &counts, &options, 0).unwrap();
    assert!((found[0] - 0.25).abs() < 1e-3 && (found[1] - 0.75).abs() < 1e-3, "{found:?}");
}

#[test]
fn a_frequent_neighbour_counts_no_more_than_the_cap() {
    let mut options = options();
    options.similarity.layer_occurrences = 1e-6;
    options.similarity.occurrences_cap = 10.0;
    let words = ["walk", "walkx", "walky"];
    let found = shares(&words, &[[0; 3], [1_000_000, 0, 0], [0, 10, 0]], &options, 0).unwrap();
    assert!((found[0] - 0.5).abs() < 1e-3 && (found[1] - 0.5).abs() < 1e-3, "{found:?}");
}

#[test]
fn where_nothing_is_known_only_an_option_makes_up_shares() {
    let (words, counts) = (["abc", "", "xyz"], [[4, 0, 0], [0, 0, 0], [0, 0, 0]]);
    let options = options();
    assert_eq!(shares(&words, &counts, &options, 1), None);
    assert_eq!(shares(&words, &counts, &options, 2), None);
    let options = SolveOptions { unseen: UnseenTokens::LayerShare, ..options };
    assert!(close(shares(&words, &counts, &options, 1).unwrap(), [1.0, 0.0, 0.0]));
    assert_eq!(shares(&words, &[[0; 3]; 3], &options, 1), None);
}

#[test]
fn own_counts_outweigh_the_prior() {
    let (words, counts) = (["walk", "walks"], [[0, 0, 1000], [50, 0, 0]]);
    let found = shares(&words, &counts, &options(), 0).unwrap();
    assert!(found[2] > 0.99, "{found:?}");
    let once = shares(&words, &[[0, 0, 1], [50, 0, 0]], &options(), 0).unwrap();
    assert!(once[0] > once[2], "{once:?}");
}

#[test]
fn without_strings_the_prior_is_the_layers() {
    let counts = [[3, 0, 0], [0, 5, 0]];
    let options = options();
    let mut shares = [0.0; GROUPS];
    assert!(Shrinkage::new(&options, None).shares(&evidence(&counts), 0, &mut shares));
    let (seen, m, layer) = (3.0, options.prior_occurrences, 3.0 / 8.0);
    assert!(close(shares, [(3.0 + m * layer) / (seen + m), m * (1.0 - layer) / (seen + m), 0.0]));
}

proptest! {
    #[test]
    fn shares_are_shares_in_any_order_of_tokens_and_the_unseen_add_nothing(
        words in prop::collection::btree_set("[abc]{1,4}", 2..12),
        seed in any::<u64>(),
    ) {
        let options = options();
        let mut words: Vec<String> = words.into_iter().collect();
        let mut random = fastrand::Rng::with_seed(seed);
        let mut counts: Vec<[u32; GROUPS]> = words.iter().map(|_| std::array::from_fn(|_| random.u32(0..3))).collect();
        let of = |words: &[String], counts: &[[u32; GROUPS]], word: &str| {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let token = words.iter().position(|other| *other == word).unwrap();
            shares(&words, counts, &options, token)
        };
        let before: Vec<_> = words.iter().map(|word| of(&words, &counts, word)).collect();
        for row in before.iter().flatten() {
            prop_assert!((row.iter().sum::<f64>() - 1.0).abs() < 1e-9 && row.iter().all(|share| *share >= 0.0));
        }
        let names = words.clone();
        let mut order: Vec<usize> = (0..words.len()).collect();
        random.shuffle(&mut order);
        words = order.iter().map(|&index| words[index].clone()).collect();
        counts = order.iter().map(|&index| counts[index]).collect();
        for (word, before) in names.iter().zip(before) {
            match (of(&words, &counts, word), before) {
                (None, None) => {}
                (Some(after), Some(before)) => {
                    let difference = after.iter().zip(before).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                    prop_assert!(difference < 1e-4, "{word}: {difference}");
                }
                other => prop_assert!(false, "{word}: {other:?}"),
            }
        }
        let after = words.iter().map(|word| of(&words, &counts, word)).collect::<Vec<_>>();
        let (mut more, mut counts_more) = (words.clone(), counts.clone());
        more.push(String::new());
        counts_more.push([0; GROUPS]);
        prop_assert_eq!(after, words.iter().map(|word| of(&more, &counts_more, word)).collect::<Vec<_>>());
    }
}
