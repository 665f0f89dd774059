//! What tokens are called, and which character sequences that gives them in common.

use std::collections::HashMap;

use semmoe_tables::ModelInfo;

use crate::error::SolveError;

/// Most characters of a token that are looked at; longer ones are runs of spaces and rules.
const MOST_CHARS: usize = 48;
/// Shortest and longest character sequence.
const GRAM_CHARS: std::ops::RangeInclusive<usize> = 2..=4;
/// Ends of a token, and how its letters are written. Vocabularies have these characters at most as tokens of one byte.
const BEGIN: char = '\u{2}';
const END: char = '\u{3}';
const CAPITALISED: char = '\u{4}';
const UPPER: char = '\u{5}';
const MIXED: char = '\u{6}';

/// One string per token of a vocabulary, by id: evidence of how a token is routed that was seen rarely or never.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenStrings {
    strings: Vec<String>,
    tokenizer_sha256: Option<String>,
}

impl TokenStrings {
    /// Takes the visible string of each id, with U+2581 for a leading space (an empty one is like no other), and the
    /// tokenizer's identity as [`ModelInfo`] has it.
    pub fn new(strings: Vec<String>, tokenizer_sha256: Option<String>) -> Self {
        TokenStrings { strings, tokenizer_sha256 }
    }

    /// Whether the tokenizer can be the model's: the same identity where both are known, and no more tokens. A model may
    /// have more rows than its tokenizer has tokens.
    pub(crate) fn check(&self, model: &ModelInfo) -> Result<(), SolveError> {
        if let (Some(found), Some(expected)) = (&self.tokenizer_sha256, &model.tokenizer_sha256)
            && found != expected
        {
            return Err(SolveError::OtherTokenizer { found: found.clone(), expected: expected.clone() });
        }
        if self.strings.len() > model.vocab_size as usize {
            return Err(SolveError::TokenizerTooLarge { found: self.strings.len(), expected: model.vocab_size });
        }
        Ok(())
    }

    fn get(&self, token: usize) -> &str {
        self.strings.get(token).map_or("", String::as_str)
    }
}

/// tf-idf vectors of unit length over the character sequences of each token, in compressed sparse rows.
#[derive(Debug)]
pub(crate) struct Vectors {
    /// [V + 1]
    start: Vec<usize>,
    /// Ascending in a row.
    gram: Vec<u32>,
    weight: Vec<f32>,
    pub(crate) grams: usize,
}

impl Vectors {
    /// Vectors of `vocabulary` tokens. `idf = 1 + ln((1 + n) / (1 + df))` over the n tokens with a string.
    pub(crate) fn new(strings: &TokenStrings, vocabulary: usize) -> Self {
        let mut ids: HashMap<u128, u32> = HashMap::new();
        let (mut start, mut gram, mut times) = (vec![0], Vec::new(), Vec::new());
        let mut row = Vec::new();
        for token in 0..vocabulary {
            grams_of(strings.get(token), &mut row);
            let mut known: Vec<u32> = row
                .iter()
                .map(|gram| {
                    let next = ids.len() as u32;
                    *ids.entry(*gram).or_insert(next)
                })
                .collect();
            known.sort_unstable();
            for same in known.chunk_by(|a, b| a == b) {
                gram.push(same[0]);
                times.push(same.len() as f32);
            }
            start.push(gram.len());
        }
        let mut vectors = Vectors { start, gram, weight: times, grams: ids.len() };
        vectors.weigh();
        vectors
    }

    pub(crate) fn row(&self, token: usize) -> impl Iterator<Item = (usize, f32)> {
        let span = self.start[token]..self.start[token + 1];
        self.gram[span.clone()].iter().map(|&gram| gram as usize).zip(self.weight[span].iter().copied())
    }

    /// [grams] tokens with each character sequence.
    pub(crate) fn users(&self) -> Vec<u32> {
        let mut users = vec![0u32; self.grams];
        self.gram.iter().for_each(|&gram| users[gram as usize] += 1);
        users
    }

    /// From counts to tf-idf of unit length.
    fn weigh(&mut self) {
        let documents = self.users();
        let tokens = self.start.windows(2).filter(|span| span[0] < span[1]).count();
        let idf = |gram: u32| 1.0 + (f64::from(1 + tokens as u32) / f64::from(1 + documents[gram as usize])).ln();
        for span in self.start.windows(2) {
            let (grams, weights) = (&self.gram[span[0]..span[1]], &mut self.weight[span[0]..span[1]]);
            let mut squares = 0.0;
            for (&gram, weight) in grams.iter().zip(weights.iter_mut()) {
                let value = f64::from(*weight) * idf(gram);
                squares += value * value;
                *weight = value as f32;
            }
            let norm = squares.sqrt() as f32;
            weights.iter_mut().for_each(|weight| *weight /= norm);
        }
    }
}

/// The character sequences of a token, each packed into one number: lower case, between marks of its ends and case.
fn grams_of(token: &str, grams: &mut Vec<u128>) {
    grams.clear();
    if token.is_empty() {
        return;
    }
    let mut chars = vec![BEGIN];
    let body = match token.strip_prefix('\u{2581}') {
        Some(rest) => {
            chars[0] = '\u{2581}';
            rest
        }
        None => token,
    };
    chars.extend(case_mark(body));
    chars.extend(body.chars().take(MOST_CHARS).flat_map(char::to_lowercase));
    chars.push(END);
    for length in GRAM_CHARS {
        let pack =
            |chars: &[char]| chars.iter().fold(0u128, |packed, &char| packed << 21 | u128::from(u32::from(char)));
        grams.extend(chars.windows(length).map(pack));
    }
}

fn case_mark(body: &str) -> Option<char> {
    let mut letters = body.chars().take(MOST_CHARS).filter(|char| char.is_alphabetic());
    let first_upper = letters.next()?.is_uppercase();
    let (mut rest, mut upper) = (0, 0);
    for letter in letters {
        rest += 1;
        upper += usize::from(letter.is_uppercase());
    }
    match (first_upper, upper) {
        (false, 0) => None,
        (true, 0) => Some(CAPITALISED),
        (true, _) if upper == rest => Some(UPPER),
        _ => Some(MIXED),
    }
}
