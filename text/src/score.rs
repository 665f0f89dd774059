//! The score of a prompt: the expected local share of its activations on each attention-DP rank.

use semmoe_tables::{Tables, TokenId};

/// Sums of T's rows over a prompt. Sums are f64 over f16 values, so exact and independent of the order of tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Score {
    /// Sum over the prompt's tokens of the expected local share, per DP rank.
    pub per_rank: Vec<f64>,
    /// Tokens summed: those that have a row in T.
    pub tokens: u64,
    /// Tokens whose row prefers some rank to another; the others carry no evidence.
    pub known: u64,
}

impl Score {
    /// The mean share per rank; `None` if no token carries evidence.
    pub fn share(&self) -> Option<Vec<f64>> {
        (self.known > 0).then(|| self.per_rank.iter().map(|sum| sum / self.tokens as f64).collect())
    }
}

/// Sums the rows of T over `ids` (Sem-MoE, section 4.2). Ids outside the vocabulary, and every id when the tables are for
/// attention TP, have no row and count nowhere.
pub fn score(tables: &Tables, ids: &[u32]) -> Score {
    let mut score = Score { per_rank: vec![0.0; usize::from(tables.dp_ranks())], tokens: 0, known: 0 };
    for &id in ids {
        let Some(row) = tables.token_row(TokenId::new(id)) else { continue };
        score.tokens += 1;
        for (sum, share) in score.per_rank.iter_mut().zip(row) {
            *sum += f64::from(*share);
        }
        score.known += u64::from(row.windows(2).any(|pair| pair[0] != pair[1]));
    }
    score
}
