//! The score of a prompt: the expected local share of its activations on each attention-DP rank.

use half::f16;

/// Sums of T's rows over a prompt. Summing f16 values in f64 is exact and therefore independent of token order.
#[derive(Debug, Clone, PartialEq)]
pub struct Score {
    /// Sum over the prompt's tokens of the expected local share, per DP rank.
    pub per_rank: Vec<f64>,
    /// Number of tokens summed: those with a row in T.
    pub tokens: u64,
    /// Number of tokens whose row prefers some rank; the others carry no evidence.
    pub known: u64,
}

impl Score {
    /// Sums rows of T, each of `dp_ranks` shares (Sem-MoE, section 4.2).
    pub fn of_rows<'a>(dp_ranks: usize, rows: impl Iterator<Item = &'a [f16]>) -> Self {
        let mut score = Self { per_rank: vec![0.0; dp_ranks], tokens: 0, known: 0 };
        for row in rows {
            score.tokens += 1;
            score.known += u64::from(row.windows(2).any(|pair| pair[0] != pair[1]));
            for (sum, share) in score.per_rank.iter_mut().zip(row) {
                *sum += f64::from(*share);
            }
        }
        score
    }

    /// Returns the mean share per rank, or `None` if no token carries evidence.
    pub fn share(&self) -> Option<Vec<f64>> {
        (self.known > 0).then(|| self.per_rank.iter().map(|sum| sum / self.tokens as f64).collect())
    }
}
