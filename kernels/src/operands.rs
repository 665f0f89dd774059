//! Operands shared by the collectives of all backends.

use crate::element::Element;
use crate::error::{KernelError, check_below, check_len};

/// Marks an unused expert slot: skipped in inputs, used as padding in outputs.
pub const NO_EXPERT: i32 = -1;

/// Used in place of a row if the token was not sent to this rank.
pub const NO_ROW: i32 = -1;

/// The layer's residual and RMSNorm, fused with a shuffled reduce-scatter.
#[derive(Clone, Copy, Debug)]
pub struct ResidualNorm<'a, T> {
    /// `[n, H]`, in token order, equal on every rank.
    pub residual: &'a [T],
    /// `[H]`
    pub weight: &'a [T],
    /// Added to the mean of squares.
    pub epsilon: f32,
}

impl<T> ResidualNorm<'_, T> {
    /// Checks the lengths for `tokens` rows of `hidden` elements.
    ///
    /// # Errors
    /// If a length does not match.
    pub fn check(&self, tokens: usize, hidden: usize) -> Result<(), KernelError> {
        check_len("residual", self.residual.len(), tokens * hidden)?;
        check_len("norm weight", self.weight.len(), hidden)
    }
}

/// One rank's tokens and their routes; n may differ between ranks.
#[derive(Clone, Copy, Debug)]
pub struct RoutedTokens<'a, T> {
    /// `[n, H]`
    pub x: &'a [T],
    /// `[n, k]`: expert ids, each below N or [`NO_EXPERT`]; those of one token are distinct.
    pub experts: &'a [i32],
    /// `[n, k]`: router weights.
    pub weights: &'a [f32],
}

impl<T: Element> RoutedTokens<'_, T> {
    /// Checks the lengths, and that every expert is below `experts`.
    ///
    /// # Errors
    /// If a length does not match, or an expert is out of range.
    pub fn check(&self, hidden: usize, top_k: usize, experts: usize) -> Result<(), KernelError> {
        if top_k == 0 {
            return Err(KernelError::OutOfRange { what: "top-k", index: 0, found: 0, bound: 0 });
        }
        let count = self.experts.len() / top_k;
        check_len("experts", self.experts.len(), count * top_k)?;
        check_len("weights", self.weights.len(), count * top_k)?;
        check_len("x", self.x.len(), count.saturating_mul(hidden))?;
        let mut chosen = self.experts.iter().enumerate().filter(|(_, expert)| **expert != NO_EXPERT);
        chosen.try_for_each(|(index, &expert)| check_below("expert", index, expert as u32 as usize, experts))
    }
}
