//! Sparse token and expert counts.

use semmoe_tables::{LayerIdx, Profile, mix64};

/// Counts of all layers.
#[derive(Debug)]
pub(crate) struct Rows {
    pub(crate) layer_ids: Vec<u16>,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    /// Occurrences of each token.
    pub(crate) tokens: Vec<u64>,
    layers: Vec<LayerRows>,
}

#[derive(Debug)]
struct LayerRows {
    /// [V + 1].
    starts: Vec<usize>,
    entries: Vec<(u16, u32)>,
}

impl Rows {
    pub(crate) fn of(profile: &Profile) -> Self {
        let model = profile.model();
        let layer = |layer: usize| {
            let mut rows = LayerRows {
                starts: vec![0],
                entries: Vec::with_capacity(profile.entries(LayerIdx::new(layer as u16))),
            };
            for row in profile.layer_rows(LayerIdx::new(layer as u16)) {
                rows.entries.extend(row.iter());
                rows.starts.push(rows.entries.len());
            }
            rows
        };
        Self {
            layer_ids: model.layer_ids.clone(),
            experts: model.num_experts.into(),
            top_k: model.top_k.into(),
            tokens: profile.token_counts().to_vec(),
            layers: (0..model.layers()).map(layer).collect(),
        }
    }

    pub(crate) fn layers(&self) -> usize {
        self.layers.len()
    }

    pub(crate) fn vocabulary(&self) -> usize {
        self.tokens.len()
    }

    /// Returns a token's experts and counts in a layer, sorted by expert.
    pub(crate) fn row(&self, layer: usize, token: usize) -> &[(u16, u32)] {
        let rows = &self.layers[layer];
        &rows.entries[rows.starts[token]..rows.starts[token + 1]]
    }

    /// Returns the activations of each expert in a layer.
    pub(crate) fn loads(&self, layer: usize) -> Vec<u64> {
        let mut loads = vec![0u64; self.experts];
        self.layers[layer].entries.iter().for_each(|(expert, count)| loads[usize::from(*expert)] += u64::from(*count));
        loads
    }

    /// Assigns every activation to one of two halves by a deterministic coin flip.
    pub(super) fn halves(&self) -> (Self, Self) {
        let mut coins = Coins(0x5eed);
        let mut parts = (self.empty(), self.empty());
        for layer in 0..self.layers() {
            for token in 0..self.vocabulary() {
                for &(expert, count) in self.row(layer, token) {
                    let one = coins.heads_of(count);
                    for (part, count) in [(&mut parts.0, one), (&mut parts.1, count - one)] {
                        part.layers[layer].entries.extend((count > 0).then_some((expert, count)));
                    }
                }
                for part in [&mut parts.0, &mut parts.1] {
                    let end = part.layers[layer].entries.len();
                    part.layers[layer].starts.push(end);
                }
            }
        }
        parts
    }

    fn empty(&self) -> Self {
        let layers = self.layers.iter().map(|_| LayerRows { starts: vec![0], entries: Vec::new() }).collect();
        Self {
            layer_ids: self.layer_ids.clone(),
            experts: self.experts,
            top_k: self.top_k,
            tokens: self.tokens.clone(),
            layers,
        }
    }

    /// Fraction of the occurrences in `self` whose token occurs in `other`.
    pub(super) fn known_share(&self, other: &Self) -> f64 {
        let all: u64 = self.tokens.iter().sum();
        let known: u64 =
            self.tokens.iter().zip(&other.tokens).filter(|(_, other)| **other > 0).map(|(here, _)| here).sum();
        if all == 0 { 0.0 } else { known as f64 / all as f64 }
    }

    /// Fraction of the occurrences whose token occurs more than once.
    pub(super) fn repeated_share(&self) -> f64 {
        let all: u64 = self.tokens.iter().sum();
        let once = self.tokens.iter().filter(|count| **count == 1).count();
        if all == 0 { 0.0 } else { 1.0 - once as f64 / all as f64 }
    }
}

/// Returns a token's total activations in a layer.
pub(crate) fn activations(row: &[(u16, u32)]) -> f64 {
    row.iter().map(|(_, count)| f64::from(*count)).sum()
}

/// A source of fair coin flips (SplitMix64).
struct Coins(u64);

impl Coins {
    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix64(self.0)
    }

    fn heads_of(&mut self, coins: u32) -> u32 {
        let (words, rest) = (coins / 64, coins % 64);
        let whole: u32 = (0..words).map(|_| self.word().count_ones()).sum();
        whole + (self.word() & ((1u64 << rest) - 1)).count_ones()
    }
}
