//! Evidence about tokens in one layer: their own counts by group, and the expectation from other tokens.

use crate::input::{SolveOptions, UnseenTokens};
use crate::prior::{Expected, TokenPrior};

/// How often each token was seen in one layer, and on which groups.
#[derive(Debug)]
pub(crate) struct LayerEvidence {
    pub(crate) groups: usize,
    /// [V, G] occurrences by group; fractional if an occurrence has experts on several groups.
    pub(crate) on_group: Vec<f64>,
    /// [V] sums of the rows of `on_group`; smaller if an activation counts on several groups.
    pub(crate) seen: Vec<f64>,
    /// [G] the layer's own shares.
    pub(crate) layer_share: Vec<f64>,
}

impl LayerEvidence {
    /// Creates evidence from [V, G] occurrences.
    pub(crate) fn new(on_group: Vec<f64>, groups: usize, layer_share: Vec<f64>) -> Self {
        let seen = on_group.chunks_exact(groups).map(|row| row.iter().sum()).collect();
        LayerEvidence { groups, on_group, seen, layer_share }
    }

    pub(crate) fn row(&self, token: usize) -> &[f64] {
        &self.on_group[token * self.groups..(token + 1) * self.groups]
    }

    /// Returns the shares of seen tokens minus the layer's shares, [V, G]; zero for unseen tokens.
    fn residual(&self) -> Vec<f32> {
        let mut residual = vec![0.0; self.on_group.len()];
        for (token, to) in residual.chunks_exact_mut(self.groups).enumerate() {
            let seen = self.seen[token];
            if seen > 0.0 {
                let shares = self.row(token).iter().zip(&self.layer_share);
                to.iter_mut().zip(shares).for_each(|(to, (count, share))| *to = (count / seen - share) as f32);
            }
        }
        residual
    }
}

/// Evidence averaged over layers to that of a single layer.
#[derive(Debug)]
pub(crate) struct MeanEvidence {
    /// Sums over layers; `on_group` has each token's shares minus its layer's shares instead of occurrences.
    sum: LayerEvidence,
    /// [V] number of layers in which a token was seen.
    layers_seen: Vec<u32>,
}

impl MeanEvidence {
    pub(crate) fn new(vocabulary: usize, groups: usize) -> Self {
        let (on_group, seen, layer_share) = (vec![0.0; vocabulary * groups], vec![0.0; vocabulary], vec![0.0; groups]);
        MeanEvidence { sum: LayerEvidence { groups, on_group, seen, layer_share }, layers_seen: vec![0; vocabulary] }
    }

    pub(crate) fn add(&mut self, evidence: &LayerEvidence) {
        let sum = &mut self.sum;
        sum.layer_share.iter_mut().zip(&evidence.layer_share).for_each(|(sum, share)| *sum += share);
        for (token, residual) in sum.on_group.chunks_exact_mut(sum.groups).enumerate() {
            let seen = evidence.seen[token];
            if seen > 0.0 {
                self.layers_seen[token] += 1;
                sum.seen[token] += seen;
                let shares = evidence.row(token).iter().zip(&evidence.layer_share);
                residual.iter_mut().zip(shares).for_each(|(sum, (count, share))| *sum += count / seen - share);
            }
        }
    }

    /// Returns the means over the `layers` added. Each token's mean covers only the layers in which it was seen.
    pub(crate) fn finish(self, layers: usize) -> LayerEvidence {
        let LayerEvidence { groups, mut on_group, mut seen, mut layer_share } = self.sum;
        layer_share.iter_mut().for_each(|share| *share /= layers as f64);
        for (token, row) in on_group.chunks_exact_mut(groups).enumerate() {
            let times = f64::from(self.layers_seen[token]);
            if times > 0.0 {
                seen[token] /= times;
                for (residual, share) in row.iter_mut().zip(&layer_share) {
                    *residual = seen[token] * (*residual / times + share);
                }
            }
        }
        LayerEvidence { groups, on_group, seen, layer_share }
    }
}

/// Parameters for turning counts into shares.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shrinkage<'a> {
    pub(crate) options: &'a SolveOptions,
    /// `None`: the prior is the layer's own share.
    pub(crate) prior: Option<&'a TokenPrior>,
}

impl Shrinkage<'_> {
    /// Fits a layer's expectations for its tokens.
    pub(crate) fn fit<'e>(&self, evidence: &'e LayerEvidence) -> Shrunk<'e> {
        let any_seen = evidence.seen.iter().any(|&seen| seen != 0.0);
        let prior = self.prior.filter(|_| any_seen);
        let expected = prior.map(|prior| prior.expect(&evidence.seen, evidence.residual(), self.options));
        let assume_layer = self.options.unseen == UnseenTokens::LayerShare && any_seen;
        let sum: f64 = evidence.layer_share.iter().sum();
        // With replicas, an activation counts on several groups, for some tokens more often than for others.
        let adds_up = ((sum - 1.0).abs() < 1e-6).then_some(sum);
        Shrunk { evidence, expected, prior_occurrences: self.options.prior_occurrences, assume_layer, adds_up }
    }
}

/// The shares of a layer's tokens.
#[derive(Debug)]
pub(crate) struct Shrunk<'e> {
    evidence: &'e LayerEvidence,
    expected: Option<Expected>,
    prior_occurrences: f64,
    /// Whether tokens without evidence get the layer's shares.
    assume_layer: bool,
    /// The sum of a token's shares, if it is the same for all tokens.
    adds_up: Option<f64>,
}

impl Shrunk<'_> {
    /// Computes the expected shares of a token, `(c + m q) / (n + m)`, where q is its prior. Returns false and leaves
    /// `shares` unspecified if neither the token nor a similar one was seen.
    pub(crate) fn shares(&self, token: usize, shares: &mut [f64]) -> bool {
        let known = self.prior(token, shares);
        let (seen, m) = (self.evidence.seen[token], self.prior_occurrences);
        for (share, &own) in shares.iter_mut().zip(self.evidence.row(token)) {
            *share = (own + m * *share) / (seen + m);
        }
        known
    }

    /// Computes a token's prior; returns whether anything is known about the token.
    pub(crate) fn prior(&self, token: usize, prior: &mut [f64]) -> bool {
        let groups = self.evidence.groups;
        prior.copy_from_slice(&self.evidence.layer_share);
        let mut known = self.evidence.seen[token] > 0.0 || self.assume_layer;
        if let Some(expected) = &self.expected {
            let residual = &expected.residual[token * groups..(token + 1) * groups];
            prior.iter_mut().zip(residual).for_each(|(prior, &above)| *prior += f64::from(above));
            clip(prior, self.adds_up);
            known |= expected.known[token];
        }
        known
    }
}

/// Sets negative shares to zero and rescales the others so that they sum to `adds_up` or, if `None`, to the previous
/// sum.
fn clip(shares: &mut [f64], adds_up: Option<f64>) {
    let all = adds_up.unwrap_or_else(|| shares.iter().sum());
    shares.iter_mut().for_each(|share| *share = share.max(0.0));
    let positive: f64 = shares.iter().sum();
    if positive > 0.0 && all > 0.0 {
        shares.iter_mut().for_each(|share| *share = (*share * all / positive).min(1.0));
    }
}

#[cfg(test)]
mod tests;
