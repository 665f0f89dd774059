//! Attention tp: the likeliest group for a token, from T's labels for the token and A's labels for its previous groups;
//! and the group that a token was on. When tokens are spread evenly over groups, `even` uses the shares of all groups.

use half::f16;
use half::slice::HalfFloatSliceExt as _;

use crate::{ExpertId, GroupId, GroupLabels, LayerIdx, MAX_LABELS, Placement, Tables, TokenId};

/// Minimum share of a group (the smallest normal f16), so that a label rounded to zero does not rule a group out.
const LEAST_SHARE: f64 = 6.103_515_625e-5;

/// A group and the share of the token's activations expected on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LikelyGroup {
    /// The group.
    pub group: GroupId,
    /// Expected share, 0 to 1.
    pub share: f64,
}

impl GroupLabels<'_> {
    /// Returns the share of one of `groups` groups. Groups without a label split the remainder evenly, `(1 - sum of the
    /// m labels) / (G - m)` each, but no more than the last label.
    pub fn share_of(&self, group: u16, groups: u16) -> f64 {
        match self.groups.iter().position(|&labelled| labelled == group) {
            Some(label) => self.probs[label].to_f64().max(LEAST_SHARE),
            None => self.rest(groups),
        }
    }

    /// Multiplies `shares`, `[groups]`, by the labels' shares.
    fn scale(&self, shares: &mut [f64]) {
        let (mut probs, mut labelled) = ([0.0; MAX_LABELS], [0.0; MAX_LABELS]);
        let probs = &mut probs[..self.probs.len()];
        self.probs.convert_to_f64_slice(probs);
        let rest = rest(probs.iter().copied(), shares.len());
        for ((labelled, prob), &group) in labelled.iter_mut().zip(&*probs).zip(self.groups) {
            *labelled = shares[usize::from(group)] * prob.max(LEAST_SHARE);
        }
        shares.iter_mut().for_each(|share| *share *= rest);
        self.groups.iter().zip(labelled).for_each(|(&group, labelled)| shares[usize::from(group)] = labelled);
    }

    /// Returns the share of each group without a label.
    fn rest(&self, groups: u16) -> f64 {
        rest(self.probs.iter().copied().map(f16::to_f64), groups.into())
    }
}

fn rest(probs: impl ExactSizeIterator<Item = f64>, groups: usize) -> f64 {
    let unlabelled = groups.saturating_sub(probs.len()).max(1);
    let (labelled, last) = probs.fold((0.0, 1.0), |(sum, _), prob| (sum + prob, prob));
    ((1.0 - labelled) / unlabelled as f64).min(last).max(LEAST_SHARE)
}

/// Returns the likeliest of `groups` groups, given T's labels of the token and A's of its two previous groups, or
/// `None` if neither has evidence. If only one has evidence, it alone is used. Otherwise both are combined by log-odds,
/// for every group g:
///
/// ```text
/// log p(g)  =  log T(g) + log A(g) + const,      p adds up to one
/// ```
///
/// which is `log T + log P(g | groups before) - log P(g)`, as the layer's own shares `P(g)` are already divided out of
/// A (the solver's README describes how). A group without a label has the share that [`GroupLabels::share_of`] returns.
/// Ties go to the first of T's labels, then of A's. Does not allocate.
pub fn likeliest_group(
    token: Option<GroupLabels<'_>>,
    before: Option<GroupLabels<'_>>,
    groups: u16,
) -> Option<LikelyGroup> {
    let (Some(token), Some(before)) = (token, before) else {
        return token.or(before).map(|labels| first(&labels));
    };
    // A group labelled by neither T nor A is no likelier than any labelled group, so it counts only in the sum.
    let new = before.groups.iter().filter(|group| !token.groups.contains(group));
    let (mut best, mut sum, mut candidates) = (LikelyGroup { group: GroupId::new(0), share: -1.0 }, 0.0, 0);
    for &group in token.groups.iter().chain(new) {
        let share = token.share_of(group, groups) * before.share_of(group, groups);
        sum += share;
        candidates += 1;
        if share > best.share {
            best = LikelyGroup { group: GroupId::new(group), share };
        }
    }
    let others = usize::from(groups).saturating_sub(candidates) as f64;
    sum += others * token.rest(groups) * before.rest(groups);
    Some(LikelyGroup { share: best.share / sum, ..best })
}

/// Fills in the share expected on every group, `[groups]`, and returns the same result as [`likeliest_group`]. All
/// shares are equal if that is `None`. The shares add up to one if both T and A are known; with a single set of labels,
/// their sum may differ from one. Does not allocate.
///
/// # Panics
/// If a label is out of range, or there are more than [`MAX_LABELS`].
pub fn group_shares(
    token: Option<GroupLabels<'_>>,
    before: Option<GroupLabels<'_>>,
    shares: &mut [f64],
) -> Option<LikelyGroup> {
    shares.fill(1.0);
    let (Some(token), Some(before)) = (token, before) else {
        let labels = token.or(before)?;
        labels.scale(shares);
        return Some(first(&labels));
    };
    token.scale(shares);
    before.scale(shares);
    let sum: f64 = shares.iter().sum();
    // Ties are broken by the order of labels.
    let labelled = token.groups.iter().chain(before.groups);
    let best =
        labelled.copied().reduce(|best, group| match shares[usize::from(group)] > shares[usize::from(best)] {
            true => group,
            false => best,
        })?;
    shares.iter_mut().for_each(|share| *share /= sum);
    Some(LikelyGroup { group: GroupId::new(best), share: shares[usize::from(best)] })
}

fn first(labels: &GroupLabels<'_>) -> LikelyGroup {
    LikelyGroup { group: GroupId::new(labels.groups[0]), share: labels.probs[0].to_f64() }
}

impl Placement {
    /// Returns the group that holds most of a token's experts in a layer, the lowest one on ties. This is the token's
    /// group as an index into A. `counts` is scratch, so that nothing is allocated per token.
    ///
    /// # Panics
    /// If the placement lacks the layer or the expert.
    pub fn main_group(
        &self,
        layer: LayerIdx,
        experts: impl IntoIterator<Item = ExpertId>,
        counts: &mut Vec<u32>,
    ) -> GroupId {
        let groups = self.layer(layer);
        counts.clear();
        counts.resize(usize::from(self.groups()), 0);
        for expert in experts {
            counts[usize::from(groups[expert.index()])] += 1;
        }
        let most = |most: usize, group| if counts[group] > counts[most] { group } else { most };
        GroupId::new((1..counts.len()).fold(0, most) as u16)
    }
}

impl Tables {
    /// Returns the best group for a token in a layer, with attention tp. `before`: the token's groups in the two
    /// previous MoE layers, older first ([`Placement::main_group`] of its top-k there), or `None` if unknown. Returns
    /// `None` without evidence, for ids out of range, and with attention dp.
    pub fn likeliest_group(
        &self,
        layer: LayerIdx,
        token: TokenId,
        before: Option<(GroupId, GroupId)>,
    ) -> Option<LikelyGroup> {
        let transition = before.and_then(|(older, newer)| self.next_groups(layer, older, newer));
        likeliest_group(self.token_groups(layer, token), transition, self.groups())
    }

    /// Computes [`group_shares`] for a token in a layer; `before` is as in [`Tables::likeliest_group`], `shares` is
    /// `[groups]`.
    ///
    /// # Panics
    /// If there are fewer shares than groups.
    pub fn group_shares(
        &self,
        layer: LayerIdx,
        token: TokenId,
        before: Option<(GroupId, GroupId)>,
        shares: &mut [f64],
    ) -> Option<LikelyGroup> {
        let transition = before.and_then(|(older, newer)| self.next_groups(layer, older, newer));
        group_shares(self.token_groups(layer, token), transition, &mut shares[..usize::from(self.groups())])
    }
}
