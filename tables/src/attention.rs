//! Per-token data of the tables: a share per rank with DP attention, the likeliest groups with TP attention.

use std::fmt;
use std::str::FromStr;

use half::f16;
use serde::{Deserialize, Serialize};

use crate::FormatError;
use crate::container::{Container, View};
use crate::model::{by_name, quoted};

/// Marks an entry of `T_group` or `A_group` without evidence.
pub const NO_GROUP: u16 = u16::MAX;
/// Maximum number of labels per token and layer.
pub const MAX_LABELS: usize = 4;
/// Tolerance for sums of shares, which may slightly exceed one because each share is rounded to f16.
const SUM_TOLERANCE: f64 = 0.01;

/// How a unit's attention is parallelised.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Attention {
    /// Data parallel: a request stays on one rank and can be pinned to it.
    Dp,
    /// Tensor parallel: every rank sees every token, and tokens are shuffled inside the unit.
    Tp,
}

impl Attention {
    /// Returns the attention that this one can switch to.
    pub fn other(self) -> Self {
        match self {
            Self::Dp => Self::Tp,
            Self::Tp => Self::Dp,
        }
    }
}

impl fmt::Display for Attention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

impl FromStr for Attention {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        by_name(text).ok_or_else(|| FormatError::field("attention", quoted(text), "dp or tp"))
    }
}

/// The likeliest groups of a token in a layer, best first; at least one.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct GroupLabels<'a> {
    /// The groups.
    pub groups: &'a [u16],
    /// The probabilities of `groups`, in the same order.
    pub probs: &'a [f16],
}

/// Row-major tensors for attention tp, as the builder expects them. Unused labels follow the used ones: [`NO_GROUP`]
/// with probability 0.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct TpParts {
    /// m: labels per token and layer, 1 to [`MAX_LABELS`].
    pub labels: usize,
    /// `T_group` [L, V, m].
    pub token_group: Vec<u16>,
    /// `T_prob` [L, V, m].
    pub token_prob: Vec<f16>,
    /// `A_group` [L, G, G, m], indexed by the groups of the two previous MoE layers, older first; layers 0 and 1 are
    /// unused.
    pub transition_group: Vec<u16>,
    /// `A_prob` [L, G, G, m].
    pub transition_prob: Vec<f16>,
}

/// Checks T with DP attention and returns a view of it.
pub(crate) fn dp_view(
    container: &Container,
    vocabulary: u64,
    ranks: u16,
    replicas: bool,
) -> Result<View<f16>, FormatError> {
    let view = container.view("T", &[vocabulary, u64::from(ranks)])?;
    // Without replicas, an activation is local on only one rank; with replicas, it can be local on several.
    let most = if replicas { f64::from(ranks) } else { 1.0 };
    for (token, row) in container.slice(&view).chunks_exact(usize::from(ranks)).enumerate() {
        if let Some(rank) = row.iter().position(|&share| !is_share(share)) {
            let at = format!("token {token}, rank {rank}");
            return Err(FormatError::value("T", at, row[rank], "a share between 0 and 1"));
        }
        let sum: f64 = row.iter().copied().map(f64::from).sum();
        if sum > most + SUM_TOLERANCE {
            let expected = format!("at most {most}");
            return Err(FormatError::value("T", format!("token {token}"), format!("a sum of {sum:.4}"), expected));
        }
    }
    Ok(view)
}

/// Checked views of T or A with TP attention: [..., m] groups and probabilities.
#[derive(Debug, Clone)]
pub(crate) struct LabelViews {
    /// m
    pub(crate) labels: usize,
    groups: View<u16>,
    probs: View<f16>,
}

impl LabelViews {
    pub(crate) fn open(
        container: &Container,
        group_name: &'static str,
        prob_name: &'static str,
        shape: &[u64],
        num_groups: u16,
    ) -> Result<Self, FormatError> {
        let labels = shape.last().map_or(0, |&m| m as usize);
        let groups = container.view(group_name, shape)?;
        let probs = container.view(prob_name, shape)?;
        let rows = container.slice(&groups).chunks_exact(labels).zip(container.slice(&probs).chunks_exact(labels));
        for (row, (ids, shares)) in rows.enumerate() {
            let place = |label: usize| format!("row {row}, label {label}");
            check_groups(ids, num_groups)
                .map_err(|(label, expected)| FormatError::value(group_name, place(label), ids[label], expected))?;
            check_probs(ids, shares)
                .map_err(|(label, expected)| FormatError::value(prob_name, place(label), shares[label], expected))?;
        }
        Ok(LabelViews { labels, groups, probs })
    }

    /// Returns the used labels of a row, or `None` without evidence.
    pub(crate) fn row<'a>(&self, container: &'a Container, row: usize) -> Option<GroupLabels<'a>> {
        let span = row * self.labels..(row + 1) * self.labels;
        let groups = container.slice(&self.groups).get(span.clone())?;
        let used = groups.iter().position(|&g| g == NO_GROUP).unwrap_or(groups.len());
        let probs = &container.slice(&self.probs)[span][..used];
        (used > 0).then_some(GroupLabels { groups: &groups[..used], probs })
    }
}

/// Checks that groups are distinct and in range, followed only by [`NO_GROUP`].
fn check_groups(ids: &[u16], num_groups: u16) -> Result<(), (usize, String)> {
    for (label, &id) in ids.iter().enumerate() {
        let before = &ids[..label];
        if id == NO_GROUP {
            continue;
        }
        if before.contains(&NO_GROUP) {
            return Err((label, format!("{NO_GROUP} after the first unused label")));
        }
        if id >= num_groups {
            return Err((label, format!("groups below {num_groups}, or {NO_GROUP}")));
        }
        if before.contains(&id) {
            return Err((label, "distinct groups".into()));
        }
    }
    Ok(())
}

/// Checks that shares are in descending order and add up to at most one, and are zero wherever there is no group.
fn check_probs(ids: &[u16], shares: &[f16]) -> Result<(), (usize, String)> {
    let mut sum = 0.0;
    for (label, &share) in shares.iter().enumerate() {
        if !is_share(share) {
            return Err((label, "a probability between 0 and 1".into()));
        }
        if ids[label] == NO_GROUP && share != f16::ZERO {
            return Err((label, "0 for an unused label".into()));
        }
        if label > 0 && share > shares[label - 1] {
            return Err((label, format!("at most {}, because the best label comes first", shares[label - 1])));
        }
        sum += f64::from(share);
        if sum > 1.0 + SUM_TOLERANCE {
            return Err((label, format!("probabilities that add up to at most 1, not {sum:.4}")));
        }
    }
    Ok(())
}

fn is_share(share: f16) -> bool {
    (f16::ZERO..=f16::ONE).contains(&share)
}
