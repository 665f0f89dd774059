#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::HashMap;
use std::path::Path;

use proptest::prelude::*;
use semmoe_text::Tokenizer;

use super::search::nearest_within;
use super::{Neighbours, Similarity, TokenStrings, most_similar};

fn strings(list: &[&str]) -> TokenStrings {
    TokenStrings::new(list.iter().map(|&string| string.to_owned()).collect(), None)
}

fn rows(neighbours: &Neighbours, tokens: usize) -> Vec<Vec<(usize, f64)>> {
    (0..tokens).map(|token| neighbours.of(token).collect()).collect()
}

/// Character sequences of lower-case words without marks of case, as text.
fn naive_grams(word: &str) -> HashMap<String, f64> {
    let mut chars: Vec<char> = word.chars().collect();
    if chars.first() != Some(&'\u{2581}') {
        chars.insert(0, '^');
    }
    chars.push('$');
    let mut grams = HashMap::new();
    for length in 2..=4 {
        for window in chars.windows(length) {
            *grams.entry(window.iter().collect()).or_insert(0.0) += 1.0;
        }
    }
    grams
}

/// Cosines of tf-idf vectors, all pairs.
fn naive_cosines(words: &[String]) -> Vec<Vec<f64>> {
    let counts: Vec<HashMap<String, f64>> =
        words.iter().map(|word| if word.is_empty() { HashMap::new() } else { naive_grams(word) }).collect();
    let documents = counts.iter().filter(|grams| !grams.is_empty()).count() as f64;
    let idf = |gram: &String| {
        let with = counts.iter().filter(|grams| grams.contains_key(gram)).count() as f64;
        1.0 + ((1.0 + documents) / (1.0 + with)).ln()
    };
    let vectors: Vec<HashMap<&String, f64>> =
        counts.iter().map(|grams| grams.iter().map(|(gram, count)| (gram, count * idf(gram))).collect()).collect();
    let norm = |vector: &HashMap<&String, f64>| vector.values().map(|x| x * x).sum::<f64>().sqrt();
    let cosine = |a: &HashMap<&String, f64>, b: &HashMap<&String, f64>| {
        if a.is_empty() || b.is_empty() {
            return 0.0;
        }
        a.iter().map(|(gram, x)| x * b.get(gram).unwrap_or(&0.0)).sum::<f64>() / (norm(a) * norm(b))
    };
    vectors.iter().map(|a| vectors.iter().map(|b| cosine(a, b)).collect()).collect()
}

proptest! {
    #[test]
    fn as_a_search_of_all_pairs(
        vocabulary in prop::collection::vec(("\u{2581}?[abc]{0,5}", 0u64..3), 1..40),
        neighbours in 0usize..6,
    ) {
        let (words, counts): (Vec<String>, Vec<u64>) = vocabulary.into_iter().unzip();
        let settings = Similarity { neighbours, power: 1.0, ..Similarity::default() };
        let found = most_similar(&TokenStrings::new(words.clone(), None), &counts, &settings, 2);
        let cosines = naive_cosines(&words);
        for (token, row) in rows(&found, words.len()).into_iter().enumerate() {
            prop_assert!(row.len() <= neighbours);
            prop_assert!(row.windows(2).all(|pair| pair[0].1 >= pair[1].1));
            for &(other, weight) in &row {
                prop_assert!(other != token && counts[other] > 0);
                prop_assert!((weight - cosines[token][other]).abs() < 1e-5);
            }
            let least = if row.len() == neighbours { row.last().map_or(1.0, |entry| entry.1) } else { 0.05 };
            for other in (0..words.len()).filter(|&other| other != token && counts[other] > 0) {
                let kept = row.iter().any(|entry| entry.0 == other);
                prop_assert!(kept || cosines[token][other] <= least + 1e-5, "{token} lacks {other}");
            }
        }
    }

    #[test]
    fn the_number_of_threads_changes_nothing(vocabulary in prop::collection::vec(("[ab \u{2581}]{0,6}", 0u64..3), 1..60)) {
        let (words, counts): (Vec<String>, Vec<u64>) = vocabulary.into_iter().unzip();
        let words = TokenStrings::new(words, None);
        let with = |threads| rows(&most_similar(&words, &counts, &Similarity::default(), threads), counts.len());
        prop_assert_eq!(with(1), with(3));
    }
}

#[test]
fn empty_strings_and_unseen_tokens_are_nobodys_neighbours() {
    let words = strings(&["", "", "word", "words", "wordy", ""]);
    let found = rows(&most_similar(&words, &[5, 5, 0, 5, 0, 0], &Similarity::default(), 1), 6);
    assert!(found[0].is_empty() && found[1].is_empty() && found[5].is_empty(), "{found:?}");
    let tokens = |row: &[(usize, f64)]| row.iter().map(|entry| entry.0).collect::<Vec<_>>();
    assert_eq!([tokens(&found[2]), tokens(&found[3]), tokens(&found[4])], [vec![3], vec![], vec![3]]);
}

#[test]
fn equal_strings_are_wholly_alike_but_case_and_spaces_count() {
    let words = strings(&["token", "token", "Token", "TOKEN", "\u{2581}token", "tokens"]);
    let found = rows(&most_similar(&words, &[1; 6], &Similarity::default(), 1), 6);
    assert_eq!(found[0][0].0, 1);
    assert!((found[0][0].1 - 1.0).abs() < 1e-5, "{found:?}");
    assert!(found[0][1..].iter().all(|&(_, weight)| weight < 0.9), "{found:?}");
}

#[test]
fn fewer_strings_than_tokens() {
    let found = most_similar(&strings(&["a", "ab"]), &[1, 1, 1, 1], &Similarity::default(), 1);
    assert!(rows(&found, 4)[2..].iter().all(Vec::is_empty));
}

#[test]
fn a_vocabulary_made_to_be_slow_loses_the_least_weights_only() {
    let words: Vec<String> = (0..300).map(|n| format!("aaaa{}", "b".repeat(n % 7))).collect();
    let words = TokenStrings::new(words, None);
    let settings = Similarity::default();
    let exact = rows(&most_similar(&words, &[1; 300], &settings, 1), 300);
    let bounded = rows(&nearest_within(&words, &[1; 300], &settings, 1, 5_000), 300);
    assert!(exact != bounded);
    assert!(bounded.iter().all(|row| row.iter().all(|&(_, weight)| (0.0..=1.0).contains(&weight))));
}

#[test]
fn the_bundled_vocabulary() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/tiny-qwen3moe-15m/tokenizer.json");
    let tokenizer = Tokenizer::from_file(&path).unwrap();
    let pieces = tokenizer.pieces();
    let id = |piece: &str| pieces.iter().position(|other| other == piece).unwrap();
    let words = TokenStrings::new(pieces.clone(), Some(tokenizer.sha256().to_owned()));
    let settings = Similarity { neighbours: 4, ..Similarity::default() };
    let found = most_similar(&words, &vec![1; pieces.len()], &settings, 2);
    let near = |piece| found.of(id(piece)).map(|(other, _)| pieces[other].as_str()).collect::<Vec<_>>();
    assert_eq!(near("\u{2581}running"), ["\u{2581}run", "\u{2581}beginning", "ning", "ining"]);
    assert_eq!(near("\u{2581}patient"), ["\u{2581}patients", "ient", "\u{2581}pat", "cient"]);
    assert_eq!(near("\u{2581}return"), ["return", "\u{2581}Return", "\u{2581}returns", "Return"]);
}
