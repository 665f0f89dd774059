//! Which rows go to which rank in one layer, and how what comes back is put together: by where the experts lie, or
//! everywhere, where every rank has a slice of every expert.

use std::fmt;
use std::ops::Range;

use semmoe_kernels::{DispatchPlan, RankRows, combine};
use serde::{Deserialize, Serialize};

use super::exchange::RoutedBatch;

/// How the experts of a model are divided among ranks. All ranks of a unit must be given the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum ExpertLayout {
    /// Expert parallel: each expert lies whole on the rank that the placement names.
    #[default]
    Ep,
    /// Tensor parallel: every rank has a slice of every expert, an even part of its intermediate width. Tokens are
    /// gathered by all ranks, and their partial sums scattered back, summed in rank order.
    Tp,
}

impl fmt::Display for ExpertLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ep => "ep",
            Self::Tp => "tp",
        })
    }
}

/// What one rank sends in one layer; reused between layers.
#[derive(Debug)]
pub(super) enum Sends {
    /// Each token to the ranks of its experts.
    ByExpert(DispatchPlan),
    /// Each token to all ranks.
    Everywhere(Whole),
}

/// All tokens of a rank with all of their pairs, for each of the ranks.
#[derive(Debug)]
pub(super) struct Whole {
    ranks: usize,
    /// `[n]`: 0, 1, ...
    tokens: Vec<u32>,
    /// `[n]`: k
    pairs: Vec<u16>,
    /// `[n, k]`
    experts: Vec<u16>,
    /// `[n, k]`
    weights: Vec<f32>,
}

impl Sends {
    pub(super) fn new(layout: ExpertLayout, ranks: usize) -> Self {
        match layout {
            ExpertLayout::Ep => Self::ByExpert(DispatchPlan::default()),
            ExpertLayout::Tp => Self::Everywhere(Whole {
                ranks,
                tokens: Vec::new(),
                pairs: Vec::new(),
                experts: Vec::new(),
                weights: Vec::new(),
            }),
        }
    }

    /// Plans one layer. Panics if the batch does not fit the placement, which the model's router rules out.
    pub(super) fn build(&mut self, batch: &RoutedBatch<'_>, rank_of: &[u16], ranks: usize) {
        match self {
            Self::ByExpert(plan) => plan
                .build(batch.experts, batch.weights, batch.top_k, rank_of, ranks)
                .expect("the router chooses among the placement's experts"),
            Self::Everywhere(whole) => whole.build(batch),
        }
    }

    /// What goes to one rank.
    pub(super) fn rank(&self, rank: usize) -> RankRows<'_> {
        match self {
            Self::ByExpert(plan) => plan.rank(rank),
            Self::Everywhere(Whole { tokens, pairs, experts, weights, .. }) => {
                RankRows { tokens, pairs, experts, weights }
            }
        }
    }

    /// Whether a pair that goes to a rank is computed there whole.
    pub(super) fn is_by_expert(&self) -> bool {
        matches!(self, Self::ByExpert(_))
    }

    /// Rows for all ranks together.
    pub(super) fn rows(&self) -> usize {
        match self {
            Self::ByExpert(plan) => plan.rows(),
            Self::Everywhere(whole) => whole.ranks * whole.tokens.len(),
        }
    }

    /// Which of them are a rank's.
    pub(super) fn row_range(&self, rank: usize) -> Range<usize> {
        match self {
            Self::ByExpert(plan) => plan.row_range(rank),
            Self::Everywhere(whole) => rank * whole.tokens.len()..(rank + 1) * whole.tokens.len(),
        }
    }

    /// Sums what the ranks returned for their rows, `[rows, H]`, into `out` `[n, H]`, overwritten: per token in rank order.
    pub(super) fn combine(&self, partials: &[f32], hidden: usize, out: &mut [f32]) {
        match self {
            Self::ByExpert(plan) => combine(plan, partials, hidden, out).expect("the plan's own rows fit it"),
            Self::Everywhere(whole) => {
                let width = whole.tokens.len() * hidden;
                out.copy_from_slice(&partials[..width]);
                for rank in 1..whole.ranks {
                    for (sum, part) in out.iter_mut().zip(&partials[rank * width..][..width]) {
                        *sum += part;
                    }
                }
            }
        }
    }
}

impl Whole {
    fn build(&mut self, batch: &RoutedBatch<'_>) {
        let tokens = batch.experts.len() / batch.top_k;
        self.tokens.clear();
        self.tokens.extend(0..tokens as u32);
        self.pairs.clear();
        self.pairs.resize(tokens, batch.top_k as u16);
        self.experts.clear();
        self.experts.extend_from_slice(batch.experts);
        self.weights.clear();
        self.weights.extend_from_slice(batch.weights);
    }
}
