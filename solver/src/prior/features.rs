//! Features of a token's string, as a sparse row: character sequences, the whole word, and marks such as
//! capitalization.

use std::collections::HashMap;

use crate::input::TokenStrings;

/// Maximum characters considered per token; longer tokens are runs of spaces or separators.
const MAX_CHARS: usize = 48;
/// Longest character sequence.
const MAX_SEQUENCE_CHARS: usize = 4;
/// Maximum entries of all rows; published vocabularies of 152,000 tokens have about 5e6. The longest sequences are
/// omitted as needed to stay within it.
const MAX_ENTRIES: usize = 16_000_000;
/// Token delimiters. Vocabularies contain these characters only as single-byte tokens, if at all.
const BEGIN: char = '\u{2}';
const END: char = '\u{3}';
/// Key prefixes for words and marks; the keys of sequences are below 2^85.
const WORD: u128 = 1 << 127;
const MARK: u128 = 1 << 126;

/// Unit-length rows over the features shared by at least two tokens, in CSR format.
#[derive(Debug, Default)]
pub(crate) struct Features {
    /// [V + 1]
    start: Vec<usize>,
    /// Ascending within a row.
    feature: Vec<u32>,
    /// [V] weight of each feature in a row: one over the square root of the row's number of features.
    pub(super) scale: Vec<f32>,
    /// [F] whether a feature is text of two or more characters. Tokens that share such a feature are similar; a shared
    /// mark or single character is not enough.
    textual: Vec<bool>,
}

impl Features {
    /// Builds rows for `vocabulary` tokens. A token without a string has an empty row. All features of a token have the
    /// same weight.
    pub(crate) fn new(strings: &TokenStrings, vocabulary: usize) -> Self {
        Self::within(strings, vocabulary, MAX_ENTRIES)
    }

    pub(super) fn within(strings: &TokenStrings, vocabulary: usize, most_entries: usize) -> Self {
        let longest = longest_within(strings, vocabulary, most_entries);
        let mut ids: HashMap<u128, u32> = HashMap::new();
        let (mut start, mut feature, mut users) = (vec![0], Vec::new(), Vec::<u32>::new());
        let (mut textual, mut keys) = (Vec::new(), Vec::new());
        for token in 0..vocabulary {
            keys_of(strings.get(token), longest, &mut keys);
            for &key in &keys {
                let id = *ids.entry(key).or_insert(users.len() as u32);
                if id as usize == users.len() {
                    users.push(0);
                    textual.push(is_textual(key));
                }
                users[id as usize] += 1;
                feature.push(id);
            }
            start.push(feature.len());
        }
        let mut features = Features { start, scale: Vec::new(), feature, textual };
        features.settle(&users);
        features
    }

    /// Features of a token.
    pub(crate) fn row(&self, token: usize) -> &[u32] {
        &self.feature[self.start[token]..self.start[token + 1]]
    }

    /// Number of entries in all rows.
    pub(crate) fn entries(&self) -> usize {
        self.feature.len()
    }

    /// Number of features, F.
    pub(crate) fn features(&self) -> usize {
        self.textual.len()
    }

    /// Returns whether each token shares a piece of text with one for which `seen` holds, [V].
    pub(crate) fn known_by(&self, seen: impl Fn(usize) -> bool) -> Vec<bool> {
        let tokens = 0..self.start.len() - 1;
        let mut supported = vec![false; self.features()];
        for token in tokens.clone().filter(|&token| seen(token)) {
            self.row(token).iter().for_each(|&at| supported[at as usize] = self.textual[at as usize]);
        }
        tokens.map(|token| self.row(token).iter().any(|&at| supported[at as usize])).collect()
    }

    /// Drops features that occur in a single token, numbers the rest in order of first use, and scales rows to unit
    /// length.
    fn settle(&mut self, users: &[u32]) {
        let (mut renamed, mut kept) = (vec![None; users.len()], 0);
        for (renamed, _) in renamed.iter_mut().zip(users).filter(|(_, users)| **users > 1) {
            *renamed = Some(kept);
            kept += 1;
        }
        self.textual = self.textual.iter().zip(users).filter(|(_, users)| **users > 1).map(|(&kind, _)| kind).collect();
        let (mut start, mut feature) = (vec![0], Vec::with_capacity(self.feature.len()));
        for span in self.start.windows(2) {
            let begin = feature.len();
            feature.extend(self.feature[span[0]..span[1]].iter().filter_map(|&id| renamed[id as usize]));
            feature[begin..].sort_unstable();
            self.scale.push((1.0 / (feature.len() - begin).max(1) as f64).sqrt() as f32);
            start.push(feature.len());
        }
        (self.start, self.feature) = (start, feature);
    }
}

/// Returns the maximum sequence length at which all rows stay within `most_entries`, or zero if the words already
/// exceed it.
fn longest_within(strings: &TokenStrings, vocabulary: usize, most_entries: usize) -> usize {
    let mut by_length = [0usize; MAX_SEQUENCE_CHARS + 1];
    for token in (0..vocabulary).map(|token| strings.get(token)).filter(|token| !token.is_empty()) {
        let chars = token.chars().take(MAX_CHARS).count() + 2;
        by_length[0] += 1 + MARKS;
        (1..=MAX_SEQUENCE_CHARS).for_each(|length| by_length[length] += (chars + 1).saturating_sub(length));
    }
    let fits = |&longest: &usize| by_length[..=longest].iter().sum::<usize>() <= most_entries;
    (1..=MAX_SEQUENCE_CHARS).rev().find(fits).unwrap_or(0)
}

fn is_textual(key: u128) -> bool {
    key & WORD != 0 || (key & MARK == 0 && key >> 42 != 0)
}

/// Marks per token.
const MARKS: usize = 9;

/// Collects the distinct features of a token, each packed into one number.
fn keys_of(token: &str, longest: usize, keys: &mut Vec<u128>) {
    keys.clear();
    if token.is_empty() {
        return;
    }
    let body: Vec<char> = token.strip_prefix('\u{2581}').unwrap_or(token).chars().take(MAX_CHARS).collect();
    let mut chars = vec![BEGIN];
    chars.extend(token.starts_with('\u{2581}').then_some('\u{2581}'));
    chars.extend(body.iter().copied().flat_map(char::to_lowercase).take(MAX_CHARS));
    chars.push(END);
    for length in 1..=longest {
        // A leading one bit distinguishes sequences of different lengths.
        let pack =
            |chars: &[char]| chars.iter().fold(1u128, |packed, &char| packed << 21 | u128::from(u32::from(char)));
        keys.extend(chars.windows(length).map(pack));
    }
    keys.push(WORD | hash(chars.iter().filter(|&&char| char != '\u{2581}')) >> 1);
    let letters = |test: fn(char) -> bool| body.iter().all(|&char| test(char));
    let space = u32::from(token.starts_with('\u{2581}'));
    let capital = u32::from(body.first().is_some_and(|first| first.is_uppercase()));
    let word = u32::from(letters(char::is_alphabetic));
    let length = body.len().min(8) as u32;
    let kind = space << 2 | capital << 1 | word;
    let marks: [u32; MARKS] = [
        space,
        capital,
        word,
        u32::from(letters(char::is_numeric)),
        u32::from(letters(|char| !char.is_lowercase()) && body.iter().any(|char| char.is_uppercase())),
        u32::from(letters(|char| char.is_ascii())),
        length,
        kind,
        kind << 4 | length,
    ];
    keys.extend((0u32..).zip(marks).map(|(mark, value)| MARK | u128::from(mark << 8 | value)));
    keys.sort_unstable();
    keys.dedup();
}

/// 128-bit FNV-1a hash.
fn hash<'a>(chars: impl Iterator<Item = &'a char>) -> u128 {
    chars.fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |hash, &char| {
        (hash ^ u128::from(u32::from(char))).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    })
}
