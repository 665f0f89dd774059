//! The unit's current layout, and the names of layouts.

use semmoe_tables::Attention;
use serde::Serialize;

use crate::ep::{ExpertLayout, ExpertSpread};

/// A layout in force; each switch creates a new one.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct UnitLayout {
    /// Switches since the start.
    pub(crate) epoch: u64,
    pub(crate) attention: Attention,
    pub(crate) spread: ExpertSpread,
    /// Digest of the placement, which stays known while experts are sliced.
    pub(crate) placement_digest: String,
}

/// Names for combinations of both axes: `ep` = attention dp and experts ep, `tp` = attention tp and experts tp, and the
/// mixed ones.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
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
}

impl LayoutName {
    pub(crate) const ALL: [Self; 6] = [Self::Ep, Self::Tp, Self::DpTp, Self::TpEp, Self::DpHybrid, Self::TpHybrid];

    pub(crate) fn of(attention: Attention, experts: ExpertLayout) -> Self {
        match (attention, experts) {
            (Attention::Dp, ExpertLayout::Ep) => Self::Ep,
            (Attention::Tp, ExpertLayout::Tp) => Self::Tp,
            (Attention::Dp, ExpertLayout::Tp) => Self::DpTp,
            (Attention::Tp, ExpertLayout::Ep) => Self::TpEp,
            (Attention::Dp, ExpertLayout::Hybrid(_)) => Self::DpHybrid,
            (Attention::Tp, ExpertLayout::Hybrid(_)) => Self::TpHybrid,
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|layout| layout.name() == name)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ep => "ep",
            Self::Tp => "tp",
            Self::DpTp => "dp-tp",
            Self::TpEp => "tp-ep",
            Self::DpHybrid => "dp-hybrid",
            Self::TpHybrid => "tp-hybrid",
        }
    }

    pub(crate) fn attention(self) -> Attention {
        match self {
            Self::Ep | Self::DpTp | Self::DpHybrid => Attention::Dp,
            Self::Tp | Self::TpEp | Self::TpHybrid => Attention::Tp,
        }
    }

    /// `None` for hybrid layouts, which a unit cannot switch to.
    pub(crate) fn experts(self) -> Option<ExpertLayout> {
        match self {
            Self::Ep | Self::TpEp => Some(ExpertLayout::Ep),
            Self::Tp | Self::DpTp => Some(ExpertLayout::Tp),
            Self::DpHybrid | Self::TpHybrid => None,
        }
    }
}

impl UnitLayout {
    pub(crate) fn name(&self) -> LayoutName {
        LayoutName::of(self.attention, self.spread.layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_axes_belong_together() {
        for layout in LayoutName::ALL {
            assert_eq!(LayoutName::from_name(layout.name()), Some(layout));
            let hybrid = || "hybrid:2x2".parse().unwrap();
            assert_eq!(LayoutName::of(layout.attention(), layout.experts().unwrap_or_else(hybrid)), layout);
            assert_eq!(serde_json::to_value(layout).unwrap(), layout.name());
        }
        assert_eq!(LayoutName::from_name("EP"), None);
    }
}
