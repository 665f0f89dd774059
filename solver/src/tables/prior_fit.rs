//! Chooses the strength of T's prior by the log loss of T's shares on counts that T was not built from.

use semmoe_tables::{Attention, LayerIdx, Placement, Profile, TokenId};
use serde::Serialize;

use crate::input::SolveOptions;
use crate::prior::evidence::{LayerEvidence, MeanEvidence, Shrinkage};
use crate::tables::token_table::{activation_evidence, count_groups};

/// Candidate pseudo-occurrences of the prior.
const PRIORS: [f64; 9] = [0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0];

/// Lower limit of a share: the smallest normal f16.
const MIN_SHARE: f64 = 6.103_515_625e-5;

/// Maximum tokens times groups used to fit the prior.
const MAX_FITTED: usize = 1 << 18;

/// The strength of the prior that best fits held-out requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PriorFit {
    /// Pseudo-occurrences given in the options.
    pub before: f64,
    /// Pseudo-occurrences with the lowest log loss on the choosing requests.
    pub best: f64,
    /// On the judging requests: mean of -log(expected share) over activations, with `before`.
    pub log_loss_before: f64,
    /// On the judging requests: mean of -log(expected share) over activations, with `best`.
    pub log_loss_best: f64,
    /// Whether T uses `best`, because it has the lower log loss on both sets.
    pub kept: bool,
}

impl PriorFit {
    /// Returns the options with the prior that T uses.
    pub(crate) fn applied(&self, options: &SolveOptions) -> SolveOptions {
        let prior_occurrences = if self.kept { self.best } else { self.before };
        SolveOptions { prior_occurrences, ..options.clone() }
    }
}

/// Fits the prior's pseudo-occurrences: chooses those with the lowest log loss of T's shares on the first counts in
/// `held`, and keeps them if the loss on the second is lower too. Returns `None` if either has no counts of tokens
/// known to T.
pub(crate) fn fit_prior(
    profile: &Profile,
    placement: &Placement,
    shrinkage: Shrinkage<'_>,
    held: [&Profile; 2],
) -> Option<PriorFit> {
    let before = shrinkage.options.prior_occurrences;
    let mut tried = vec![before];
    tried.extend(PRIORS.iter().filter(|&&prior| prior != before));
    let [on_choose, on_judge] = log_losses(profile, placement, shrinkage, held, &tried);
    let best = (1..tried.len()).fold(0, |best, at| if on_choose.sum[at] < on_choose.sum[best] { at } else { best });
    (on_choose.activations > 0.0 && on_judge.activations > 0.0).then(|| PriorFit {
        before,
        best: tried[best],
        log_loss_before: on_judge.sum[0] / on_judge.activations,
        log_loss_best: on_judge.sum[best] / on_judge.activations,
        kept: best > 0 && on_judge.sum[best] < on_judge.sum[0],
    })
}

/// Sums of -log(expected share) over the activations of a profile, by pseudo-occurrences.
#[derive(Debug)]
struct LogLosses {
    activations: f64,
    sum: Vec<f64>,
}

fn log_losses(
    profile: &Profile,
    placement: &Placement,
    shrinkage: Shrinkage<'_>,
    held: [&Profile; 2],
    tried: &[f64],
) -> [LogLosses; 2] {
    let (groups, layers) = (usize::from(placement.groups()), profile.model().layers());
    let vocabulary = profile.model().vocab_size;
    let mut tokens: Vec<TokenId> = (0..vocabulary).map(TokenId::new).collect();
    tokens.retain(|&token| held.iter().any(|profile| profile.token_count(token) > 0));
    let step = (tokens.len() * groups).div_ceil(MAX_FITTED).max(1);
    let tokens: Vec<TokenId> = tokens.into_iter().step_by(step).collect();
    let mut losses = [(); 2].map(|()| LogLosses { activations: 0.0, sum: vec![0.0; tried.len()] });
    let new_rows = || vec![Row::new(groups, tried.len()); tokens.len()];
    let (mut rows, mut counts) = (new_rows(), vec![0; groups]);
    let mut add_rows = |rows: &[Row], evidence: &LayerEvidence| {
        // The expectation for a token does not depend on the prior's weight.
        let shrunk = shrinkage.fit(evidence);
        let mut expected = vec![0.0; groups];
        for (&token, row) in tokens.iter().zip(rows) {
            if shrunk.prior(token.index(), &mut expected) {
                row.add_to(&mut losses, &expected);
            }
        }
    };
    let mut mean =
        (shrinkage.options.attention == Attention::Dp).then(|| MeanEvidence::new(vocabulary as usize, groups));
    for layer in LayerIdx::all(layers) {
        let evidence = activation_evidence(profile, layer, placement);
        for (&token, row) in tokens.iter().zip(&mut rows) {
            for (profile, sums) in held.iter().zip(row.counts.chunks_exact_mut(groups)) {
                count_groups(profile, layer, token, placement.layer(layer), &mut counts);
                sums.iter_mut().zip(&counts).for_each(|(sum, &count)| *sum += count as f64);
            }
            row.add_own(tried, evidence.row(token.index()), evidence.seen[token.index()]);
        }
        match &mut mean {
            Some(mean) => mean.add(&evidence),
            None => add_rows(&std::mem::replace(&mut rows, new_rows()), &evidence),
        }
    }
    // With DP attention, a row of T is the mean over layers.
    if let Some(mean) = mean {
        add_rows(&rows, &mean.finish(layers));
    }
    losses
}

/// One row of T for every candidate number m of pseudo-occurrences, and the observed counts; summed over layers with
/// attention dp.
#[derive(Clone, Debug)]
struct Row {
    /// [2, G]
    counts: Vec<f64>,
    /// [tried, G] the token's own part, `c / (n + m)`.
    own: Vec<f64>,
    /// [tried] the weight of the expectation, `m / (n + m)`.
    pull: Vec<f64>,
}

impl Row {
    fn new(groups: usize, tried: usize) -> Self {
        Row { counts: vec![0.0; 2 * groups], own: vec![0.0; tried * groups], pull: vec![0.0; tried] }
    }

    fn add_own(&mut self, tried: &[f64], own: &[f64], seen: f64) {
        for ((m, sums), pull) in tried.iter().zip(self.own.chunks_exact_mut(own.len())).zip(&mut self.pull) {
            sums.iter_mut().zip(own).for_each(|(sum, count)| *sum += count / (seen + m));
            *pull += m / (seen + m);
        }
    }

    fn add_to(&self, losses: &mut [LogLosses; 2], expected: &[f64]) {
        let groups = expected.len();
        for (losses, counts) in losses.iter_mut().zip(self.counts.chunks_exact(groups)) {
            losses.activations += counts.iter().sum::<f64>();
            for ((sum, own), pull) in losses.sum.iter_mut().zip(self.own.chunks_exact(groups)).zip(&self.pull) {
                let shares = || own.iter().zip(expected).map(|(own, expected)| own + pull * expected);
                let all: f64 = shares().sum();
                let each = counts.iter().zip(shares());
                *sum -= each.map(|(count, share)| count * (share / all).max(MIN_SHARE).ln()).sum::<f64>();
            }
        }
    }
}
