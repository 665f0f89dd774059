#![allow(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;

use super::{LayerEvidence, Shrinkage, clip};
use crate::input::options::{SolveOptions, UnseenTokens};
use crate::prior::{TokenPrior, test_options};

const GROUPS: usize = 3;

fn evidence(counts: &[[u32; GROUPS]]) -> LayerEvidence {
    let all: f64 = counts.iter().flatten().map(|&count| f64::from(count)).sum();
    let total = |group: usize| counts.iter().map(|row| f64::from(row[group])).sum::<f64>();
    let share = (0..GROUPS).map(|group| if all == 0.0 { 1.0 / GROUPS as f64 } else { total(group) / all });
    let on_group = counts.iter().flatten().map(|&count| f64::from(count)).collect();
    LayerEvidence::new(on_group, GROUPS, share.collect())
}

/// The shares of all tokens; `None` without evidence.
fn shares(words: &[&str], counts: &[[u32; GROUPS]], options: &SolveOptions) -> Vec<Option<[f64; GROUPS]>> {
    let prior = TokenPrior::of_strings(words);
    let evidence = evidence(counts);
    let shrunk = Shrinkage { options, prior: Some(&prior) }.fit(&evidence);
    let of = |token| {
        let mut shares = [0.0; GROUPS];
        shrunk.shares(token, &mut shares).then_some(shares)
    };
    (0..words.len()).map(of).collect()
}

fn close(a: [f64; GROUPS], b: [f64; GROUPS]) -> bool {
    a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-9)
}

#[test]
fn an_unseen_token_leans_where_tokens_like_it_go() {
    let words = ["walk", "walks", "walked", "gene", "genes", "genetic", "zzz"];
    let counts = [[0; 3], [9, 0, 0], [9, 0, 0], [0; 3], [0, 9, 0], [0, 9, 0], [0, 0, 18]];
    let found = shares(&words, &counts, &test_options());
    let (walk, gene) = (found[0].unwrap(), found[3].unwrap());
    assert!(walk[0] > 0.4 && walk[0] > walk[1] + 0.2, "{walk:?}");
    assert!(gene[1] > 0.4 && gene[1] > gene[0] + 0.2, "{gene:?}");
}

#[test]
fn a_frequent_token_counts_no_more_than_the_cap() {
    let words = ["walk", "walkx", "walky"];
    let mut options = test_options();
    options.ridge.occurrences_cap = 10.0;
    let with = |count| {
        let counts = [[0; 3], [count, 0, 0], [0, 10, 0]];
        let (mut shares, evidence) = ([0.0; GROUPS], evidence(&counts));
        // The layer's own shares follow the counts; the residuals should not.
        let evidence = LayerEvidence { layer_share: vec![1.0 / 3.0; 3], ..evidence };
        let prior = TokenPrior::of_strings(&words);
        assert!(Shrinkage { options: &options, prior: Some(&prior) }.fit(&evidence).prior(0, &mut shares));
        shares
    };
    assert!(close(with(10), with(1_000_000)));
    assert!((with(10)[0] - with(10)[1]).abs() < 1e-6 && !close(with(5), with(10)));
}

#[test]
fn where_nothing_is_known_only_an_option_makes_up_shares() {
    let (words, counts) = (["abc", "", "xyz"], [[4, 0, 0], [0, 0, 0], [0, 0, 0]]);
    let options = test_options();
    assert_eq!(shares(&words, &counts, &options)[1..], [None, None]);
    let options = SolveOptions { unseen: UnseenTokens::LayerShare, ..options };
    assert!(close(shares(&words, &counts, &options)[1].unwrap(), [1.0, 0.0, 0.0]));
    assert_eq!(shares(&words, &[[0; 3]; 3], &options), [None; 3]);
}

#[test]
fn own_counts_outweigh_the_prior() {
    let words = ["walk", "walks"];
    let often = shares(&words, &[[0, 0, 1000], [50, 0, 0]], &test_options())[0].unwrap();
    assert!(often[2] > 0.99, "{often:?}");
    let once = shares(&words, &[[0, 0, 1], [50, 0, 0]], &test_options())[0].unwrap();
    assert!(once[0] > once[2], "{once:?}");
}

#[test]
fn without_strings_the_prior_is_the_layers() {
    let counts = evidence(&[[3, 0, 0], [0, 5, 0]]);
    let options = test_options();
    let mut shares = [0.0; GROUPS];
    assert!(Shrinkage { options: &options, prior: None }.fit(&counts).shares(0, &mut shares));
    let (seen, m, layer) = (3.0, options.prior_occurrences, 3.0 / 8.0);
    assert!(close(shares, [(3.0 + m * layer) / (seen + m), m * (1.0 - layer) / (seen + m), 0.0]));
}

#[test]
fn clipping_keeps_the_sum() {
    let mut shares = [0.9, 0.3, -0.2];
    clip(&mut shares, Some(1.0));
    assert!(close(shares, [0.75, 0.25, 0.0]));
    let mut more_than_one_place = [0.9, 0.8, -0.1];
    clip(&mut more_than_one_place, None);
    assert!((more_than_one_place.iter().sum::<f64>() - 1.6).abs() < 1e-12);
}

proptest! {
    #[test]
    fn shares_are_shares_in_any_order_of_tokens_and_the_unseen_add_nothing(
        words in prop::collection::btree_set("[abc]{1,4}", 2..12),
        seed in any::<u64>(),
    ) {
        let options = test_options();
        let mut words: Vec<String> = words.into_iter().collect();
        let mut random = fastrand::Rng::with_seed(seed);
        let mut counts: Vec<[u32; GROUPS]> = words.iter().map(|_| std::array::from_fn(|_| random.u32(0..3))).collect();
        let of = |words: &[String], counts: &[[u32; GROUPS]]| {
            shares(&words.iter().map(String::as_str).collect::<Vec<_>>(), counts, &options)
        };
        let before = of(&words, &counts);
        for row in before.iter().flatten() {
            prop_assert!((row.iter().sum::<f64>() - 1.0).abs() < 1e-9 && row.iter().all(|share| *share >= 0.0));
        }
        let mut order: Vec<usize> = (0..words.len()).collect();
        random.shuffle(&mut order);
        words = order.iter().map(|&index| words[index].clone()).collect();
        counts = order.iter().map(|&index| counts[index]).collect();
        let after = of(&words, &counts);
        for (now, &then) in after.iter().zip(&order) {
            match (now, before[then]) {
                (None, None) => {}
                (Some(now), Some(then)) => {
                    let difference = now.iter().zip(then).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                    prop_assert!(difference < 1e-4, "{difference}");
                }
                other => prop_assert!(false, "{other:?}"),
            }
        }
        words.push(String::new());
        counts.push([0; GROUPS]);
        prop_assert_eq!(&after[..], &of(&words, &counts)[..after.len()]);
    }
}
