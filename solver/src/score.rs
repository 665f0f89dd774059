//! The score of a prompt with T, as the gateway computes it (semmoe-text has the same rule over tables; this crate
//! must not depend on tokenizers to have it).

use half::f16;
use semmoe_tables::TokenId;

/// Mean of the prompt's rows of T, per rank: f64 sums over f16 values, exact and independent of order. Ids without a
/// row count nowhere; `None` when no row prefers any rank.
pub(crate) fn mean_share<'a>(
    prompt: &[u32],
    ranks: usize,
    row: impl Fn(TokenId) -> Option<&'a [f16]>,
) -> Option<Vec<f64>> {
    let mut sums = vec![0.0; ranks];
    let (mut tokens, mut evidence) = (0u64, false);
    for row in prompt.iter().filter_map(|&id| row(TokenId::new(id))) {
        tokens += 1;
        evidence |= row.windows(2).any(|pair| pair[0] != pair[1]);
        for (sum, share) in sums.iter_mut().zip(row) {
            *sum += f64::from(*share);
        }
    }
    evidence.then(|| sums.iter().map(|sum| sum / tokens as f64).collect())
}
