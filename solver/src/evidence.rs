//! What is known of the tokens in one layer: their own counts by group, and those of similar tokens.

use crate::options::{SolveOptions, UnseenTokens};
use crate::similar::Neighbours;

/// How much each token was seen in one layer, and on which groups.
#[derive(Debug)]
pub(crate) struct LayerEvidence {
    pub(crate) groups: usize,
    /// [V, G] occurrences by group, fractional where an occurrence has experts on several.
    pub(crate) on_group: Vec<f64>,
    /// [V] sums of the rows.
    pub(crate) seen: Vec<f64>,
    /// [G] the layer's own shares.
    pub(crate) layer_share: Vec<f64>,
}

impl LayerEvidence {
    /// From [V, G] occurrences.
    pub(crate) fn new(on_group: Vec<f64>, groups: usize, layer_share: Vec<f64>) -> Self {
        let seen = on_group.chunks_exact(groups).map(|row| row.iter().sum()).collect();
        LayerEvidence { groups, on_group, seen, layer_share }
    }

    fn is_empty(&self) -> bool {
        self.seen.iter().all(|&seen| seen == 0.0)
    }

    fn row(&self, token: usize) -> &[f64] {
        &self.on_group[token * self.groups..(token + 1) * self.groups]
    }
}

/// How counts become shares.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shrinkage<'a> {
    options: &'a SolveOptions,
    /// `None`: the prior is the layer's own share.
    neighbours: Option<&'a Neighbours>,
}

impl<'a> Shrinkage<'a> {
    pub(crate) fn new(options: &'a SolveOptions, neighbours: Option<&'a Neighbours>) -> Self {
        Shrinkage { options, neighbours }
    }

    pub(crate) fn prior_occurrences(&self) -> f64 {
        self.options.prior_occurrences
    }

    /// The expected shares of a token, `(c + m q) / (n + m)` with its prior q; false, and `shares` meaningless, where
    /// nothing is known: neither the token nor a similar one was seen.
    pub(crate) fn shares(&self, evidence: &LayerEvidence, token: usize, shares: &mut [f64]) -> bool {
        let seen = evidence.seen[token];
        let similar = self.prior(evidence, token, shares);
        let m = self.options.prior_occurrences;
        for (share, &own) in shares.iter_mut().zip(evidence.row(token)) {
            *share = (own + m * *share) / (seen + m);
        }
        seen > 0.0 || similar > 0.0 || (self.options.unseen == UnseenTokens::LayerShare && !evidence.is_empty())
    }

    /// The prior of a token, and the capped occurrences of similar tokens behind it: their shares, each token's by its
    /// similarity and capped occurrences, and the layer's.
    fn prior(&self, evidence: &LayerEvidence, token: usize, prior: &mut [f64]) -> f64 {
        let settings = &self.options.similarity;
        let base = settings.layer_occurrences;
        prior.iter_mut().zip(&evidence.layer_share).for_each(|(prior, share)| *prior = base * share);
        let mut weight = 0.0;
        for (other, similarity) in self.neighbours.into_iter().flat_map(|neighbours| neighbours.of(token)) {
            let seen = evidence.seen[other];
            if seen > 0.0 {
                let each = similarity * (settings.occurrences_cap / seen).min(1.0);
                prior.iter_mut().zip(evidence.row(other)).for_each(|(prior, count)| *prior += each * count);
                weight += each * seen;
            }
        }
        prior.iter_mut().for_each(|prior| *prior /= base + weight);
        weight
    }
}

#[cfg(test)]
#[path = "evidence_tests.rs"]
mod tests;
