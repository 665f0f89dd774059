//! The score of a prompt by rows of T that need not be in tables yet.

use half::f16;
use semmoe_tables::{Score, TokenId};

/// Mean of the prompt's rows of T, per rank, as the gateway computes it. Ids without a row count nowhere; `None` when
/// no row prefers any rank.
pub(crate) fn mean_share<'a>(
    prompt: &[u32],
    ranks: usize,
    row: impl Fn(TokenId) -> Option<&'a [f16]>,
) -> Option<Vec<f64>> {
    Score::of_rows(ranks, prompt.iter().filter_map(|&id| row(TokenId::new(id)))).share()
}
