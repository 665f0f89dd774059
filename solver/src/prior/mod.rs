//! A prior for tokens seen rarely or never: a ridge regression from token strings and embeddings to the shares of seen
//! tokens.

mod components;
mod dense;
pub(crate) mod evidence;
mod features;
mod ridge;
#[cfg(test)]
mod tests;

use semmoe_tables::{Attention, Profile};

#[cfg(test)]
pub(crate) use tests::test_options;

use crate::input::{RidgeOptions, SolveError, SolveOptions};
use dense::DenseFeatures;
use features::Features;
use ridge::{Ridge, steps_for};

/// Information about the vocabulary's tokens other than their counts.
#[derive(Debug)]
pub(crate) struct TokenPrior {
    embeddings: Option<DenseFeatures>,
    strings: Option<Features>,
    /// Number of regressions in a solve: one per layer, or one for all.
    regressions: usize,
}

/// The expected shares of a layer's tokens, derived from seen tokens.
#[derive(Debug)]
pub(crate) struct Expected {
    /// [V, G] shares minus those of the layer.
    pub(crate) residual: Vec<f32>,
    /// [V] whether the expectation is based on any seen token.
    pub(crate) known: Vec<bool>,
}

impl TokenPrior {
    /// Builds a prior from the token strings and embeddings in the options; returns `None` if there are none.
    pub(crate) fn new(profile: &Profile, options: &SolveOptions) -> Result<Option<Self>, SolveError> {
        let vocabulary = profile.model().vocab_size;
        if let Some(strings) = &options.token_strings {
            strings.check(profile.model())?;
        }
        if let Some(embeddings) = &options.embeddings
            && embeddings.rows() < vocabulary as usize
        {
            let path = embeddings.path().to_path_buf();
            return Err(SolveError::TooFewEmbeddings { path, found: embeddings.rows(), expected: vocabulary });
        }
        if options.token_strings.is_none() && options.embeddings.is_none() {
            return Ok(None);
        }
        let dense = |embeddings| DenseFeatures::new(embeddings, vocabulary as usize, options.threads);
        let sparse = |strings| Features::new(strings, vocabulary as usize);
        let embeddings = options.embeddings.as_deref().map(dense);
        let regressions = match options.attention {
            Attention::Tp => profile.model().layers(),
            Attention::Dp => 1,
        };
        Ok(Some(TokenPrior { embeddings, strings: options.token_strings.as_deref().map(sparse), regressions }))
    }

    /// Returns whether each token resembles one for which `seen` holds, [V]: both share a piece of text, or both have
    /// embeddings.
    pub(crate) fn known_by(&self, seen: impl Fn(usize) -> bool, vocabulary: usize) -> Vec<bool> {
        let mut known = match &self.strings {
            Some(strings) => strings.known_by(&seen),
            None => vec![false; vocabulary],
        };
        if let Some(embeddings) = &self.embeddings
            && (0..vocabulary).any(|token| seen(token) && embeddings.has(token))
        {
            known.iter_mut().enumerate().for_each(|(token, known)| *known |= embeddings.has(token));
        }
        known
    }

    /// Regresses the `residual` shares [V, G] of tokens with `seen` occurrences [V] on the embeddings, and the
    /// remaining residual on the strings.
    pub(crate) fn expect(&self, seen: &[f64], mut residual: Vec<f32>, options: &SolveOptions) -> Expected {
        let RidgeOptions { penalty, occurrences_cap } = options.ridge;
        let weight: Vec<f32> = seen.iter().map(|seen| seen.min(occurrences_cap) as f32).collect();
        let known = self.known_by(|token| weight[token] > 0.0, weight.len());
        let mut expected = vec![0.0; residual.len()];
        let mut take = |residual: &mut [f32], found: Vec<f32>| {
            residual.iter_mut().zip(&found).for_each(|(left, found)| *left -= found);
            expected.iter_mut().zip(&found).for_each(|(sum, found)| *sum += found);
        };
        if let Some(rows) = &self.embeddings {
            let found = rows.predict(&weight, &residual, penalty, options.threads);
            take(&mut residual, found);
        }
        if let Some(rows) = &self.strings {
            let groups = residual.len() / weight.len().max(1);
            let ridge = Ridge { penalty, steps: steps_for(rows, groups * self.regressions) };
            let found = ridge::predict(rows, &weight, &residual, ridge, options.threads);
            take(&mut residual, found);
        }
        Expected { residual: expected, known }
    }
}
