//! Counts in slabs. A slab is as many (layer, token) cells as the memory limit allows, and needs one pass over the
//! traces.
//!
//! A cell counts one token in one layer. For frequent tokens it contains N counters; for rare tokens, a list of experts
//! sized for the worst case. So a slab is never larger than a small multiple of the routes it counts, nor than N
//! counters per token that occurred. Slabs follow file order, layer by layer, so results are written immediately. Each
//! thread owns a range of tokens: threads never wait for each other, and the counts do not depend on their number.

use std::ops::Range;

use semmoe_tables::{ExpertRows, LayerIdx, Phase, ProfileRow, ProfileWriter, TokenId};

use super::inputs::{Fate, Inputs, Piece, positions};
use crate::{ProfilerError, Progress};

/// The memory layout of cells.
#[derive(Debug)]
pub(super) struct Cells {
    /// \[V + 1\]: number of words in one layer before each token.
    before: Vec<u64>,
    num_experts: usize,
    top_k: usize,
}

/// Returns the prefix sums, including the total.
pub(super) fn sums_before(numbers: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut sums = vec![0];
    let mut sum = 0;
    sums.extend(numbers.map(|number| {
        sum += number;
        sum
    }));
    sums
}

/// A rectangle of cells counted in one pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Slab {
    pub(super) layers: Range<usize>,
    pub(super) tokens: Range<usize>,
}

impl Cells {
    pub(super) fn new(occurrences: &[u64], num_experts: u16, top_k: u16) -> Self {
        let (n, k) = (u64::from(num_experts), u64::from(top_k));
        // A list takes one extra word for its length, and at most as many words as a full row of counters.
        let words = |times: u64| if times == 0 { 0 } else { n.min(times.saturating_mul(k).saturating_add(1)) };
        let before = sums_before(occurrences.iter().map(|times| words(*times)));
        Cells { before, num_experts: num_experts.into(), top_k: top_k.into() }
    }

    fn width(&self, token: usize) -> usize {
        (self.before[token + 1] - self.before[token]) as usize
    }

    /// Returns the number of words that these tokens take in one layer.
    fn words(&self, tokens: &Range<usize>) -> u64 {
        self.before[tokens.end] - self.before[tokens.start]
    }

    /// Divides all cells into slabs of at most `most_words` words, in file order. A single large cell may exceed the
    /// limit.
    pub(super) fn slabs(&self, layers: usize, most_words: u64) -> Vec<Slab> {
        let tokens = 0..self.before.len() - 1;
        let all = self.words(&tokens);
        if all == 0 {
            return Vec::new();
        }
        let at_once = usize::try_from(most_words / all).unwrap_or(usize::MAX).min(layers);
        if at_once > 0 {
            // Slabs of equal size take the same number of passes and no more memory than necessary.
            let step = layers.div_ceil(layers.div_ceil(at_once));
            let slab = |first| Slab { layers: first..(first + step).min(layers), tokens: tokens.clone() };
            return (0..layers).step_by(step).map(slab).collect();
        }
        let parts = self.parts(&tokens, |token| self.before[token], most_words.max(1));
        let of_layer = |layer| parts.iter().map(move |part| Slab { layers: layer..layer + 1, tokens: part.clone() });
        (0..layers).flat_map(of_layer).collect()
    }

    /// Splits tokens into ranges with a weight of at most `most`, given prefix sums `before`. A single token may exceed
    /// it.
    fn parts(&self, tokens: &Range<usize>, before: impl Fn(usize) -> u64, most: u64) -> Vec<Range<usize>> {
        let mut parts = Vec::new();
        let mut start = tokens.start;
        for token in tokens.clone() {
            if token > start && before(token + 1) - before(start) > most {
                parts.push(start..token);
                start = token;
            }
        }
        parts.push(start..tokens.end);
        parts
    }
}

/// The inputs shared by all counting passes.
#[derive(Clone, Copy)]
pub(super) struct Counting<'a> {
    pub(super) inputs: &'a Inputs,
    pub(super) pieces: &'a [Piece],
    pub(super) phase: Phase,
    pub(super) cells: &'a Cells,
    /// \[V + 1\]: number of occurrences before each token.
    pub(super) before: &'a [u64],
    pub(super) threads: usize,
    pub(super) progress: &'a dyn Progress,
}

/// Counters for a range of tokens, ordered by token, then by layer.
struct Part {
    tokens: Range<usize>,
    words: Vec<u32>,
}

impl Counting<'_> {
    /// Counts a slab and passes its rows to the writer.
    pub(super) fn count(&self, slab: &Slab, writer: &mut ProfileWriter) -> Result<(), ProfilerError> {
        let all = self.before[slab.tokens.end] - self.before[slab.tokens.start];
        let share = all.div_ceil(self.threads as u64).max(1);
        let ranges = self.cells.parts(&slab.tokens, |token| self.before[token], share);
        let parts: Vec<Part> = std::thread::scope(|scope| {
            let count = |tokens| scope.spawn(move || self.count_part(slab, tokens));
            let threads: Vec<_> = ranges.into_iter().map(count).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, Part>| match thread.join() {
                Ok(part) => part,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            threads.into_iter().map(join).collect()
        });
        let mut row = Row::default();
        for layer in slab.layers.clone() {
            for part in &parts {
                self.emit(slab, layer, part, &mut row, writer)?;
            }
        }
        Ok(())
    }

    fn count_part(&self, slab: &Slab, tokens: Range<usize>) -> Part {
        let words = self.cells.words(&tokens) * slab.layers.len() as u64;
        let mut part = Part { tokens, words: vec![0; words as usize] };
        for piece in self.pieces {
            let file = &self.inputs.files[piece.file];
            let mut counted = 0;
            for r in piece.requests.clone().filter(|&r| file.fates[r] == Fate::Counted) {
                let request = file.rows.request(r);
                let positions = positions(request, self.phase);
                let ids = request.token_ids();
                counted += match file.rows.experts(r) {
                    ExpertRows::Narrow(rows) => self.add(&mut part, slab, ids, rows, positions, u8::MAX),
                    ExpertRows::Wide(rows) => self.add(&mut part, slab, ids, rows, positions, u16::MAX),
                };
            }
            file.rows.release(piece.requests.clone());
            self.progress.advance(counted);
        }
        part
    }

    /// Counts the tokens of a request that belong to the part.
    fn add<T: Copy + Into<u16> + PartialEq>(
        &self,
        part: &mut Part,
        slab: &Slab,
        ids: &[u32],
        rows: &[T],
        positions: Range<usize>,
        unknown: T,
    ) -> u64 {
        let Cells { before, num_experts, top_k } = self.cells;
        let row_len = self.inputs.model.layers() * top_k;
        let first = before[part.tokens.start];
        let mut counted = 0;
        for position in positions {
            let token = ids[position] as usize;
            if !part.tokens.contains(&token) {
                continue;
            }
            let width = self.cells.width(token);
            if width == 0 {
                continue;
            }
            counted += 1;
            let start = (before[token] - first) as usize * slab.layers.len();
            let cells = part.words[start..start + width * slab.layers.len()].chunks_exact_mut(width);
            let row = &rows[position * row_len + slab.layers.start * top_k..][..slab.layers.len() * top_k];
            for (cell, route) in cells.zip(row.chunks_exact(*top_k)).filter(|(_, route)| route[0] != unknown) {
                if width == *num_experts {
                    route.iter().for_each(|&expert| cell[usize::from(expert.into())] += 1);
                } else {
                    let length = cell[0] as usize;
                    let list = cell[1 + length..].iter_mut();
                    list.zip(route).for_each(|(slot, &expert)| *slot = u32::from(expert.into()));
                    cell[0] += *top_k as u32;
                }
            }
        }
        counted
    }

    fn emit(
        &self,
        slab: &Slab,
        layer: usize,
        part: &Part,
        row: &mut Row,
        writer: &mut ProfileWriter,
    ) -> Result<(), ProfilerError> {
        let first = self.cells.before[part.tokens.start];
        let layers = slab.layers.len();
        for token in part.tokens.clone() {
            let width = self.cells.width(token);
            if width == 0 {
                continue;
            }
            let start = (self.cells.before[token] - first) as usize * layers + (layer - slab.layers.start) * width;
            let cell = &part.words[start..start + width];
            row.experts.clear();
            row.counts.clear();
            if width == self.cells.num_experts {
                row.of_counters(cell);
            } else {
                row.of_list(&cell[1..=cell[0] as usize]);
            }
            let counts = ProfileRow { experts: &row.experts, counts: &row.counts };
            writer.push(LayerIdx::new(layer as u16), TokenId::new(token as u32), counts)?;
        }
        Ok(())
    }
}

/// Buffer for a row to pass to the writer.
#[derive(Default)]
struct Row {
    experts: Vec<u16>,
    counts: Vec<u32>,
    list: Vec<u32>,
}

impl Row {
    fn of_counters(&mut self, counters: &[u32]) {
        for (expert, &count) in counters.iter().enumerate().filter(|(_, count)| **count > 0) {
            self.experts.push(expert as u16);
            self.counts.push(count);
        }
    }

    fn of_list(&mut self, list: &[u32]) {
        self.list.clear();
        self.list.extend_from_slice(list);
        self.list.sort_unstable();
        for same in self.list.chunk_by(|a, b| a == b) {
            self.experts.push(same[0] as u16);
            self.counts.push(same.len() as u32);
        }
    }
}
