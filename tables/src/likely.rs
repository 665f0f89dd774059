//! The group to put a token on with attention tp: what T says of the token and A of the groups before it, in one rule; and which
//! group a token was on.

use half::f16;

use crate::{ExpertId, GroupId, GroupLabels, LayerIdx, Placement, Tables, TokenId};

/// The least share that a group counts with, the least normal f16: a label rounded to zero must not rule a group out.
const LEAST_SHARE: f64 = 6.103_515_625e-5;

/// A group and the share of the token's activations that is expected on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LikelyGroup {
    /// The group.
    pub group: GroupId,
    /// Expected share, 0 to 1.
    pub share: f64,
}

impl GroupLabels<'_> {
    /// The share of a group, of `groups` in all. Those without a label share evenly what the labels leave,
    /// `(1 - sum of the m labels) / (G - m)`, and are no likelier than the last label.
    #[must_use]
    pub fn share_of(&self, group: u16, groups: u16) -> f64 {
        match self.groups.iter().position(|&labelled| labelled == group) {
            Some(label) => self.probs[label].to_f64().max(LEAST_SHARE),
            None => self.rest(groups),
        }
    }

    /// The share of each group that has no label.
    fn rest(&self, groups: u16) -> f64 {
        let unlabelled = usize::from(groups).saturating_sub(self.groups.len()).max(1);
        let labelled: f64 = self.probs.iter().copied().map(f16::to_f64).sum();
        let last = self.probs.last().map_or(1.0, |last| last.to_f64());
        ((1.0 - labelled) / unlabelled as f64).min(last).max(LEAST_SHARE)
    }
}

/// The likeliest of `groups` groups by T's labels of the token and A's of the two groups before; `None` where neither says
/// anything. One without the other is taken as it is. Both combine by log-odds: for every group g
///
/// ```text
/// log p(g)  =  log T(g) + log A(g) + const,      p adds up to one
/// ```
///
/// which is `log T + log P(g | groups before) - log P(g)` with the layer's own shares `P(g)` already divided out of A
/// (the solver's README has how A is made). Groups without a label count with what the labels leave
/// ([`GroupLabels::share_of`]). Of equals the first of T's labels, then of A's. Allocates nothing.
#[must_use]
pub fn likeliest_group(
    token: Option<GroupLabels<'_>>,
    before: Option<GroupLabels<'_>>,
    groups: u16,
) -> Option<LikelyGroup> {
    let (token, before) = match (token, before) {
        (Some(token), Some(before)) => (token, before),
        (one, other) => return one.or(other).map(|labels| first(&labels)),
    };
    // A group without a label in either is no likelier than any with one, so that it only counts in the sum.
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

fn first(labels: &GroupLabels<'_>) -> LikelyGroup {
    LikelyGroup { group: GroupId::new(labels.groups[0]), share: labels.probs[0].to_f64() }
}

impl Placement {
    /// The group that holds most of a token's experts in a layer, the lowest of equals: the token's group, as A is asked by it.
    /// `counts` is scratch, so that nothing is allocated for each token.
    ///
    /// # Panics
    /// For a layer or an expert that the placement does not have.
    #[must_use]
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
    /// The group to put a token on in a layer, with attention tp. `before` are its groups in the two MoE layers before, older
    /// first, as its routes there were ([`Placement::main_group`] of its top-k); `None` where they are not known. `None` where nothing is known of the token, for ids out of range, and with attention dp.
    #[must_use]
    pub fn likeliest_group(
        &self,
        layer: LayerIdx,
        token: TokenId,
        before: Option<(GroupId, GroupId)>,
    ) -> Option<LikelyGroup> {
        let transition = before.and_then(|(older, newer)| self.next_groups(layer, older, newer));
        likeliest_group(self.token_groups(layer, token), transition, self.groups())
    }
}
