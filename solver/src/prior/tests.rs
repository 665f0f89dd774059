#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;

use proptest::prelude::*;
use semmoe_tables::{Attention, Embeddings};
use semmoe_text::Tokenizer;

use super::dense::DenseFeatures;
use super::features::Features;
use super::{TokenPrior, ridge};
use crate::fixtures::provenance;
use crate::input::options::SolveOptions;
use crate::input::strings::TokenStrings;

/// Default options for this crate's tests.
pub(crate) fn test_options() -> SolveOptions {
    SolveOptions::new(3, Attention::Tp, provenance())
}

impl TokenPrior {
    /// A prior from strings alone.
    pub(crate) fn of_strings(words: &[&str]) -> Self {
        TokenPrior { embeddings: None, strings: Some(features(words)), regressions: 1 }
    }
}

fn features(words: &[&str]) -> Features {
    let strings = words.iter().map(|&word| word.to_owned()).collect();
    Features::new(&TokenStrings::new(strings, None), words.len())
}

/// Settings that run a regression to convergence.
fn fully(penalty: f64) -> ridge::Ridge {
    ridge::Ridge { penalty, steps: ridge::MAX_STEPS }
}

/// Rows as dense vectors.
fn dense(features: &Features, tokens: usize) -> Vec<Vec<f64>> {
    let row = |token| {
        let mut row = vec![0.0; features.features()];
        features.row(token).iter().for_each(|&at| row[at as usize] += f64::from(features.scale[token]));
        row
    };
    (0..tokens).map(row).collect()
}

/// Ridge regression by elimination on the normal equations.
fn by_elimination(rows: &[Vec<f64>], weight: &[f32], target: &[f32], penalty: f64) -> Vec<f64> {
    let size = rows[0].len();
    let mut system = vec![vec![0.0; size + 1]; size];
    for ((row, &weight), &y) in rows.iter().zip(weight).zip(target) {
        for (at, equation) in system.iter_mut().enumerate() {
            equation.iter_mut().zip(row).for_each(|(to, x)| *to += f64::from(weight) * row[at] * x);
            equation[size] += f64::from(weight) * row[at] * f64::from(y);
        }
    }
    (0..size).for_each(|at| system[at][at] += penalty);
    for at in 0..size {
        let pivot = system[at].clone();
        for (other, equation) in system.iter_mut().enumerate().filter(|(other, _)| *other != at) {
            let by = equation[at] / pivot[at];
            assert!(by.is_finite(), "row {other}");
            equation.iter_mut().zip(&pivot).for_each(|(to, from)| *to -= by * from);
        }
    }
    let b: Vec<f64> = (0..size).map(|at| system[at][size] / system[at][at]).collect();
    rows.iter().map(|row| row.iter().zip(&b).map(|(x, b)| x * b).sum()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn as_by_elimination(
        vocabulary in prop::collection::vec(("\u{2581}?[abAB]{1,4}", 0u8..4, -1.0f32..1.0), 2..14),
        penalty in 0.5..8.0,
    ) {
        let words: Vec<&str> = vocabulary.iter().map(|token| token.0.as_str()).collect();
        let weight: Vec<f32> = vocabulary.iter().map(|token| f32::from(token.1)).collect();
        let target: Vec<f32> = vocabulary.iter().map(|token| token.2).collect();
        let features = features(&words);
        let found = ridge::predict(&features, &weight, &target, fully(penalty), 1);
        if features.features() > 0 {
            let expected = by_elimination(&dense(&features, words.len()), &weight, &target, penalty);
            for (found, expected) in found.iter().zip(expected) {
                prop_assert!((f64::from(*found) - expected).abs() < 0.03, "{found} {expected}");
            }
        } else {
            prop_assert!(found.iter().all(|value| *value == 0.0));
        }
    }

    #[test]
    fn neither_threads_nor_other_targets_change_a_bit(
        vocabulary in prop::collection::vec("[ab \u{2581}]{0,6}", 1..40),
        seed in any::<u64>(),
    ) {
        let words: Vec<&str> = vocabulary.iter().map(String::as_str).collect();
        let features = features(&words);
        let mut random = fastrand::Rng::with_seed(seed);
        let weight: Vec<f32> = words.iter().map(|_| f32::from(random.u8(0..3))).collect();
        let target: Vec<f32> = (0..words.len() * 19).map(|_| random.f32() - 0.5).collect();
        let all = ridge::predict(&features, &weight, &target, fully(3.0), 1);
        prop_assert_eq!(&all, &ridge::predict(&features, &weight, &target, fully(3.0), 3));
        let some: Vec<f32> = target.chunks_exact(19).flat_map(|row| [row[18], row[3], row[7]]).collect();
        let found = ridge::predict(&features, &weight, &some, fully(3.0), 2);
        for (row, all) in found.chunks_exact(3).zip(all.chunks_exact(19)) {
            prop_assert_eq!(row, [all[18], all[3], all[7]]);
        }
    }

    #[test]
    fn any_strings_give_rows_of_unit_length(words in prop::collection::vec(any::<String>(), 0..30)) {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let features = features(&words);
        for (word, row) in words.iter().zip(dense(&features, words.len())) {
            let square: f64 = row.iter().map(|value| value * value).sum();
            prop_assert!(row.iter().all(|value| *value == 0.0) || (square - 1.0).abs() < 1e-5, "{word}");
        }
    }
}

#[test]
fn a_linear_truth_is_found_again() {
    let (stems, ends) = (["walk", "talk", "jump", "paint", "climb", "open"], ["", "s", "ed", "ing", "er", "able"]);
    let words: Vec<String> = stems.iter().flat_map(|stem| ends.iter().map(move |end| format!("{stem}{end}"))).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let truth = |at: usize| [0.3, -0.2, 0.1, 0.0, -0.1, -0.1][at / 6] + [0.1, 0.2, -0.3, 0.0, 0.1, -0.1][at % 6];
    let target: Vec<f32> = (0..36).map(|at| truth(at) as f32).collect();
    // Each word is left out once.
    for kept in 0..36 {
        let weight: Vec<f32> = (0..36).map(|at| if at == kept { 0.0 } else { 1.0 }).collect();
        let found = f64::from(ridge::predict(&features(&words), &weight, &target, fully(0.01), 1)[kept]);
        assert!((found - truth(kept)).abs() < 0.16, "{}: {found}, not {}", words[kept], truth(kept));
    }
}

#[test]
fn equal_strings_have_equal_rows_but_case_and_spaces_count() {
    let features = features(&["token", "token", "Token", "TOKEN", "\u{2581}token", "tokens"]);
    assert_eq!(features.row(0), features.row(1));
    for other in 2..6 {
        assert_ne!(features.row(0), features.row(other));
    }
}

#[test]
fn a_piece_of_text_makes_tokens_alike_and_a_mark_does_not() {
    let known = |words: &[&str], seen: usize| features(words).known_by(|token| token == seen);
    assert_eq!(known(&["walk", "walks", "xyz", ""], 0), [true, true, false, false]);
    // As long, equally a word and lower-case, but with nothing in common.
    assert_eq!(known(&["walk", "gene", "benches"], 0), [false, false, false]);
    assert_eq!(known(&["\u{4e2d}", "\u{56fd}", "\u{4e2d}\u{56fd}"], 0), [true, false, true]);
}

#[test]
fn fewer_strings_than_tokens() {
    let strings = TokenStrings::new(vec!["abc".into(), "abd".into()], None);
    let features = Features::new(&strings, 4);
    assert_eq!(features.known_by(|token| token != 1), [true, true, false, false]);
    assert!(features.row(3).is_empty());
}

#[test]
fn a_vocabulary_made_to_be_large_loses_the_longest_sequences_only() {
    let words: Vec<String> = (0..300).map(|n| format!("aaaa{}", "b".repeat(n % 7))).collect();
    let strings = TokenStrings::new(words, None);
    let sizes = [usize::MAX, 9_000, 6_000, 100].map(|most| Features::within(&strings, 300, most).features());
    assert!(sizes.windows(2).all(|pair| pair[0] > pair[1]) && sizes[3] > 0, "{sizes:?}");
}

#[test]
fn large_regressions_take_fewer_steps() {
    let features = features(&["walk", "walks", "walked"]);
    let steps = |targets| ridge::steps_for(&features, targets);
    assert_eq!((steps(0), steps(16), steps(usize::MAX)), (30, 30, 5));
    let between = 30_000_000_000 / features.entries() / 9;
    assert_eq!(steps(between), 9);
}

#[test]
fn the_bundled_vocabulary() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/tiny-qwen3moe-15m/tokenizer.json");
    let tokenizer = Tokenizer::from_file(&path).unwrap();
    let pieces = tokenizer.pieces();
    let words: Vec<&str> = pieces.iter().map(String::as_str).collect();
    let (features, id) = (features(&words), |piece: &str| words.iter().position(|other| *other == piece).unwrap());
    let near = |a: &str, b: &str| {
        let (a, b) = (id(a), id(b));
        features.row(a).iter().filter(|at| features.row(b).contains(at)).count() as f32
            * features.scale[a]
            * features.scale[b]
    };
    assert!(near("\u{2581}patient", "\u{2581}patients") > near("\u{2581}patient", "ient"));
    assert!(near("\u{2581}return", "\u{2581}Return") > near("\u{2581}return", "\u{2581}patient") + 0.3);
}

/// Embeddings [V, width] in a file of 32-bit numbers.
fn embeddings(values: &[f32], width: usize) -> Embeddings {
    let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let (rows, end) = (values.len() / width, data.len());
    let header = format!(
        r#"{{"embed_tokens.weight": {{"dtype": "F32", "shape": [{rows}, {width}], "data_offsets": [0, {end}]}}}}"#
    );
    let length = (header.len() as u64).to_le_bytes();
    Embeddings::from_bytes([&length[..], header.as_bytes(), &data].concat(), None).unwrap()
}

/// Values [V, width], of which only the first `varied` differ much between tokens.
fn values(tokens: usize, width: usize, varied: usize, random: &mut fastrand::Rng) -> Vec<f32> {
    let mut value = |at: usize| (random.f32() - 0.5) * if at < varied { 1.0 } else { 0.01 };
    (0..tokens * width).map(|at| value(at % width)).collect()
}

#[test]
fn what_depends_on_the_embedding_is_found_again() {
    let (tokens, width) = (3000, 300);
    let mut random = fastrand::Rng::with_seed(5);
    let values = values(tokens, width, 20, &mut random);
    let direction: Vec<f32> = (0..20).map(|_| random.f32() - 0.5).collect();
    let length = |row: &[f32]| row.iter().map(|value| value * value).sum::<f32>().sqrt();
    let along = |row: &[f32]| row.iter().zip(&direction).map(|(x, b)| x * b).sum::<f32>() / length(row);
    let target: Vec<f32> = values.chunks_exact(width).map(along).collect();
    // Every second token is left out.
    let weight: Vec<f32> = (0..tokens).map(|token| (token % 2) as f32).collect();
    let features = DenseFeatures::new(&embeddings(&values, width), tokens, 2);
    let found = features.predict(&weight, &target, 0.1, 2);
    let (mut error, mut all) = (0.0, 0.0);
    for token in (0..tokens).step_by(2) {
        error += f64::from(found[token] - target[token]).powi(2);
        all += f64::from(target[token]).powi(2);
    }
    assert!(error < 0.01 * all, "{error} of {all}");
}

#[test]
fn embeddings_on_any_number_of_threads_and_no_embedding() {
    let (tokens, width) = (2500, 140);
    let mut random = fastrand::Rng::with_seed(6);
    let mut values = values(tokens, width, 140, &mut random);
    values[7 * width..8 * width].fill(0.0);
    let embeddings = embeddings(&values, width);
    let target: Vec<f32> = (0..tokens * 5).map(|_| random.f32() - 0.5).collect();
    let weight: Vec<f32> = (0..tokens).map(|_| f32::from(random.u8(0..3))).collect();
    let with = |threads| {
        let features = DenseFeatures::new(&embeddings, tokens, threads);
        let first = features.predict(&weight, &target, 3.0, threads);
        let other = features.predict(&vec![1.0; tokens], &target, 3.0, threads);
        assert!(features.has(0) && !features.has(7) && first[35..40] == [0.0; 5]);
        assert!(first != other && first == features.predict(&weight, &target, 3.0, threads));
        first
    };
    assert_eq!(with(1), with(3));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn narrow_embeddings_as_by_elimination(
        tokens in 3usize..30, width in 1usize..6, penalty in 0.1..5.0, seed in any::<u64>(),
    ) {
        let mut random = fastrand::Rng::with_seed(seed);
        let values = values(tokens, width, width, &mut random);
        let features = DenseFeatures::new(&embeddings(&values, width), tokens, 1);
        let weight: Vec<f32> = (0..tokens).map(|_| f32::from(random.u8(0..3))).collect();
        let target: Vec<f32> = (0..tokens).map(|_| random.f32() - 0.5).collect();
        let rows: Vec<Vec<f64>> =
            (0..tokens).map(|token| features.row(token).iter().map(|&value| f64::from(value)).collect()).collect();
        let expected = by_elimination(&rows, &weight, &target, penalty);
        for (found, expected) in features.predict(&weight, &target, penalty, 1).iter().zip(expected) {
            prop_assert!((f64::from(*found) - expected).abs() < 1e-4, "{found} {expected}");
        }
    }
}
