//! The seen tokens most similar to each token, through an inverted index.

use std::cmp::Ordering;

use super::Similarity;
use super::strings::{TokenStrings, Vectors};

/// Most products of weights in a search, if nothing could be left out. Published vocabularies stay below half of it (some
/// 4e9 for the 151,643 tokens of Qwen3, all seen), so that their nearest neighbours are exact; only one made to be slow
/// loses the longest lists' least weights.
const MOST_PRODUCTS: u64 = 10_000_000_000;
/// Tokens that a thread takes at once.
const CHUNK: usize = 1024;
/// Less similar tokens are no evidence.
const LEAST_SIMILARITY: f32 = 0.05;
/// More than the rounding errors of a similarity.
const ROUNDING: f32 = 1e-4;

/// The most similar seen tokens of each token: never the token itself, best first.
#[derive(Debug, Default)]
pub(crate) struct Neighbours {
    /// [V + 1]
    start: Vec<usize>,
    token: Vec<u32>,
    /// Similarity to the power asked for.
    weight: Vec<f32>,
}

impl Neighbours {
    /// (token, weight) of the tokens similar to `token`.
    pub(crate) fn of(&self, token: usize) -> impl Iterator<Item = (usize, f64)> {
        let span = match self.start.get(token..token + 2) {
            Some(span) => span[0]..span[1],
            None => 0..0,
        };
        self.token[span.clone()]
            .iter()
            .map(|&token| token as usize)
            .zip(self.weight[span].iter().map(|&w| f64::from(w)))
    }
}

/// The most similar tokens of every token among those with a count, best first, of equals the lower id. Work is bounded
/// by [`MOST_PRODUCTS`], memory is linear in the tokens' lengths; the result does not depend on `threads`.
pub(crate) fn most_similar(
    strings: &TokenStrings,
    counts: &[u64],
    settings: &Similarity,
    threads: usize,
) -> Neighbours {
    nearest_within(strings, counts, settings, threads, MOST_PRODUCTS)
}

pub(super) fn nearest_within(
    strings: &TokenStrings,
    counts: &[u64],
    settings: &Similarity,
    threads: usize,
    most_products: u64,
) -> Neighbours {
    let vectors = Vectors::new(strings, counts.len());
    let index = Index::new(&vectors, counts, most_products);
    let search = Search { vectors: &vectors, index: &index, settings };
    let chunks = counts.len().div_ceil(CHUNK);
    let next = std::sync::atomic::AtomicUsize::new(0);
    let (sender, found) = std::sync::mpsc::channel();
    let mut rows = vec![Vec::new(); chunks];
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, chunks.max(1)) {
            let (search, next, sender) = (&search, &next, sender.clone());
            scope.spawn(move || {
                let mut scratch = Scratch::new(counts.len(), search.vectors.grams);
                loop {
                    let chunk = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    if chunk >= chunks {
                        return;
                    }
                    let tokens = chunk * CHUNK..((chunk + 1) * CHUNK).min(counts.len());
                    let rows: Vec<Vec<(u32, f32)>> = tokens.map(|token| search.nearest(token, &mut scratch)).collect();
                    // The receiver outlives the threads.
                    let _ = sender.send((chunk, rows));
                }
            });
        }
        drop(sender);
        for (chunk, found) in found {
            rows[chunk] = found;
        }
    });
    let mut neighbours = Neighbours { start: vec![0], ..Neighbours::default() };
    for row in rows.iter().flatten() {
        neighbours.token.extend(row.iter().map(|entry| entry.0));
        neighbours.weight.extend(row.iter().map(|entry| entry.1));
        neighbours.start.push(neighbours.token.len());
    }
    neighbours
}

/// From each character sequence to the seen tokens with it.
struct Index {
    /// [grams + 1]
    start: Vec<usize>,
    /// (token, weight), heaviest first in a list.
    postings: Vec<(u32, f32)>,
}

impl Index {
    fn new(vectors: &Vectors, counts: &[u64], most_products: u64) -> Self {
        let mut length = vec![0usize; vectors.grams];
        let seen = || (0..counts.len()).filter(|&token| counts[token] > 0);
        seen().for_each(|token| vectors.row(token).for_each(|(gram, _)| length[gram] += 1));
        let mut next = Vec::with_capacity(length.len());
        let mut total = 0;
        for length in &length {
            next.push(total);
            total += length;
        }
        let mut all = vec![(0u32, 0.0f32); total];
        for token in seen() {
            for (gram, weight) in vectors.row(token) {
                all[next[gram]] = (token as u32, weight);
                next[gram] += 1;
            }
        }
        let most = longest_list(vectors, &length, most_products);
        let mut index = Index { start: vec![0], postings: Vec::with_capacity(total) };
        for (&end, &length) in next.iter().zip(&length) {
            let list = &mut all[end - length..end];
            list.sort_unstable_by(heavier);
            index.postings.extend_from_slice(&list[..length.min(most)]);
            index.start.push(index.postings.len());
        }
        index
    }

    fn list(&self, gram: usize) -> &[(u32, f32)] {
        &self.postings[self.start[gram]..self.start[gram + 1]]
    }
}

/// The most postings of a list with which the whole search stays within `most_products`.
fn longest_list(vectors: &Vectors, length: &[usize], most_products: u64) -> usize {
    let users = vectors.users();
    let mut most = length.iter().copied().max().unwrap_or(0);
    let products = |most: usize| -> u128 {
        users.iter().zip(length).map(|(&users, &length)| u128::from(users) * length.min(most) as u128).sum()
    };
    while most > 1 && products(most) > u128::from(most_products) {
        most /= 2;
    }
    most
}

/// Greater weight first, of equals the lower id.
fn heavier(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

struct Search<'a> {
    vectors: &'a Vectors,
    index: &'a Index,
    settings: &'a Similarity,
}

/// Reused from token to token.
struct Scratch {
    /// [V] similarity to the token at hand, as far as its sequences were looked at; zero where untouched.
    partial: Vec<f32>,
    touched: Vec<u32>,
    /// [grams] weights of the token at hand.
    own: Vec<f32>,
    /// Partial similarities, to select from.
    select: Vec<f32>,
    /// (token, similarity)
    found: Vec<(u32, f32)>,
}

impl Scratch {
    fn new(vocabulary: usize, grams: usize) -> Self {
        let (touched, select, found) = (Vec::new(), Vec::new(), Vec::new());
        Scratch { partial: vec![0.0; vocabulary], touched, own: vec![0.0; grams], select, found }
    }

    /// The `rank`-th greatest partial similarity, not counting `token` itself; [`LEAST_SIMILARITY`] at least.
    fn threshold(&mut self, token: usize, rank: usize) -> f32 {
        let others = self.touched.iter().filter(|&&other| other as usize != token);
        self.select.clear();
        self.select.extend(others.map(|&other| self.partial[other as usize]));
        if self.select.len() < rank {
            return LEAST_SIMILARITY;
        }
        let (_, value, _) = self.select.select_nth_unstable_by(rank - 1, |a, b| b.total_cmp(a));
        value.max(LEAST_SIMILARITY)
    }
}

impl Search<'_> {
    /// (token, similarity to the power asked for) of the nearest tokens.
    ///
    /// Rare sequences come first. Vectors have unit length, so that no token is more similar than its part so far plus
    /// the length of what is left of this token's vector: once that is less than the last of the nearest has already,
    /// the lists left (the long ones) need not be read, and few candidates remain.
    fn nearest(&self, token: usize, scratch: &mut Scratch) -> Vec<(u32, f32)> {
        let keep = self.settings.neighbours;
        if keep == 0 {
            return Vec::new();
        }
        let mut grams: Vec<(usize, f32)> = self.vectors.row(token).collect();
        grams.sort_by_key(|&(gram, _)| self.index.list(gram).len());
        let mut left: f32 = grams.iter().map(|(_, weight)| weight * weight).sum();
        let mut threshold = LEAST_SIMILARITY;
        for &(gram, weight) in &grams {
            let list = self.index.list(gram);
            if list.len() * 2 > scratch.touched.len() {
                threshold = scratch.threshold(token, keep);
            }
            if left.max(0.0).sqrt() + ROUNDING < threshold {
                break;
            }
            for &(other, other_weight) in list {
                let partial = &mut scratch.partial[other as usize];
                if *partial == 0.0 {
                    scratch.touched.push(other);
                }
                *partial += weight * other_weight;
            }
            left -= weight * weight;
        }
        let least = scratch.threshold(token, keep) - left.max(0.0).sqrt() - ROUNDING;
        self.finish(token, &grams, least, scratch)
    }

    /// The whole similarity of the candidates whose part is at least `least`, and the best of them.
    fn finish(&self, token: usize, grams: &[(usize, f32)], least: f32, scratch: &mut Scratch) -> Vec<(u32, f32)> {
        let Scratch { partial, touched, own, found, .. } = scratch;
        grams.iter().for_each(|&(gram, weight)| own[gram] = weight);
        found.clear();
        for other in touched.drain(..) {
            if std::mem::take(&mut partial[other as usize]) < least || other as usize == token {
                continue;
            }
            let similarity: f32 = self.vectors.row(other as usize).map(|(gram, weight)| own[gram] * weight).sum();
            if similarity >= LEAST_SIMILARITY {
                found.push((other, similarity.min(1.0)));
            }
        }
        grams.iter().for_each(|&(gram, _)| own[gram] = 0.0);
        let keep = self.settings.neighbours;
        if found.len() > keep {
            found.select_nth_unstable_by(keep, heavier);
            found.truncate(keep);
        }
        found.sort_unstable_by(heavier);
        let weight = |similarity: f32| f64::from(similarity).powf(self.settings.power) as f32;
        found.iter().map(|&(other, similarity)| (other, weight(similarity))).collect()
    }
}
