//! The unit's current layout, and the names of layouts.

use std::fmt;

use semmoe_tables::Attention;

use crate::ep::{ExpertLayout, ExpertPlacement, NodeLayout, RankGroups};
use crate::model::AttentionShape;

/// The layout that the unit runs in; each switch creates a new one.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct UnitLayout {
    /// Number of switches since startup.
    pub(crate) epoch: u64,
    pub(crate) attention: Attention,
    pub(crate) placement: ExpertPlacement,
    /// Digest of the placement, retained even while experts are sliced.
    pub(crate) placement_digest: String,
}

/// Names for combinations of attention and expert layouts: `ep` is attention dp with experts ep, `tp` is attention tp
/// with experts tp; the other names state both.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum LayoutName {
    /// Attention dp, experts ep.
    Ep,
    /// Attention tp, experts tp.
    Tp,
    /// Attention dp, experts tp.
    DpTp,
    /// Attention tp, experts ep.
    TpEp,
    /// Attention dp, experts sliced within nodes.
    DpHybrid,
    /// Attention tp, experts sliced within nodes.
    TpHybrid,
    /// Attention and experts tp, in groups of ranks that step independently.
    Groups(RankGroups),
}

impl LayoutName {
    /// All layouts without groups.
    pub(crate) const ALL: [Self; 6] = [Self::Ep, Self::Tp, Self::DpTp, Self::TpEp, Self::DpHybrid, Self::TpHybrid];

    pub(crate) fn of(attention: Attention, experts: ExpertLayout) -> Self {
        match (attention, experts) {
            (_, ExpertLayout::Groups(groups)) => Self::Groups(groups),
            (Attention::Dp, ExpertLayout::Ep) => Self::Ep,
            (Attention::Tp, ExpertLayout::Tp) => Self::Tp,
            (Attention::Dp, ExpertLayout::Tp) => Self::DpTp,
            (Attention::Tp, ExpertLayout::Ep) => Self::TpEp,
            (Attention::Dp, ExpertLayout::Hybrid(_)) => Self::DpHybrid,
            (Attention::Tp, ExpertLayout::Hybrid(_)) => Self::TpHybrid,
        }
    }

    pub(crate) fn attention(self) -> Attention {
        match self {
            Self::Ep | Self::DpTp | Self::DpHybrid => Attention::Dp,
            Self::Tp | Self::TpEp | Self::TpHybrid | Self::Groups(_) => Attention::Tp,
        }
    }

    /// Returns the expert layout; `None` for hybrid layouts, except `dp-hybrid` in a unit that can switch to `hybrid`.
    pub(crate) fn experts(self, hybrid: Option<NodeLayout>) -> Option<ExpertLayout> {
        match self {
            Self::Ep | Self::TpEp => Some(ExpertLayout::Ep),
            Self::Tp | Self::DpTp => Some(ExpertLayout::Tp),
            Self::Groups(groups) => Some(ExpertLayout::Groups(groups)),
            Self::DpHybrid => hybrid.map(ExpertLayout::Hybrid),
            Self::TpHybrid => None,
        }
    }
}

impl fmt::Display for LayoutName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ep => "ep",
            Self::Tp => "tp",
            Self::DpTp => "dp-tp",
            Self::TpEp => "tp-ep",
            Self::DpHybrid => "dp-hybrid",
            Self::TpHybrid => "tp-hybrid",
            Self::Groups(groups) => return write!(f, "tp:{groups}"),
        })
    }
}

impl UnitLayout {
    pub(crate) fn name(&self) -> LayoutName {
        LayoutName::of(self.attention, self.placement.layout)
    }

    /// Returns the attention shape in a unit of `world` ranks. A unit in which only attention is grouped never
    /// switches.
    pub(crate) fn attention_shape(&self, world: u16) -> AttentionShape {
        let ranks = match (self.attention, self.placement.layout.groups()) {
            (Attention::Dp, _) => 1,
            (Attention::Tp, Some(groups)) => groups.ranks,
            (Attention::Tp, None) => world,
        };
        AttentionShape { attention: self.attention, ranks: ranks.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_axes_belong_together() {
        let groups = LayoutName::Groups(RankGroups::new(2, 4).unwrap());
        assert_eq!(groups.to_string(), "tp:2x2");
        for layout in LayoutName::ALL.into_iter().chain([groups]) {
            let nodes: NodeLayout = "2x2".parse().unwrap();
            let experts = layout.experts(Some(nodes)).unwrap_or(ExpertLayout::Hybrid(nodes));
            assert_eq!(LayoutName::of(layout.attention(), experts), layout);
        }
        let names: std::collections::BTreeSet<_> = LayoutName::ALL.iter().map(ToString::to_string).collect();
        assert_eq!(names.len(), LayoutName::ALL.len());
    }
}
