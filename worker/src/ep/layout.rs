//! Expert layouts and their collectives.

use std::fmt;
use std::str::FromStr;

use semmoe_kernels::Element;
use semmoe_kernels::collectives::{
    Collectives, HybridCollectives, Lockstep, MAX_CHUNKS, PrivateMemory, RowCollectives, RowMemory, StageObserver,
    UnitError, UnitLink,
};
use serde::{Deserialize, Serialize};

use super::wire::{UnknownName, WireRows};

/// How a model's experts are divided among ranks. All ranks of a unit must use the same layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum ExpertLayout {
    /// Expert parallel: each expert resides whole on the rank given by the placement.
    #[default]
    Ep,
    /// Tensor parallel: every rank has a slice of every expert, an equal part of its intermediate width. Tokens are
    /// gathered on all ranks, and the partial sums are reduce-scattered back, added in rank order.
    Tp,
    /// Hybrid: each expert resides on the node given by the placement, and every rank of that node has a slice of it.
    Hybrid(NodeLayout),
    /// Tensor parallel within independent groups of consecutive ranks; each group has all experts. Only a switch can
    /// select this layout.
    Groups(RankGroups),
}

/// Independent groups of consecutive ranks, each serving its own sequences: rank r is in group r / P.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct RankGroups {
    /// N: at least 2.
    pub groups: u16,
    /// P: ranks per group, at least 2.
    pub ranks: u16,
}

impl RankGroups {
    /// Divides `world` ranks evenly into `groups` groups; `None` if that is impossible or either number would be below
    /// 2.
    pub fn new(groups: u16, world: u16) -> Option<Self> {
        let ranks = world.checked_div(groups)?;
        (groups > 1 && ranks > 1 && groups.checked_mul(ranks) == Some(world)).then_some(Self { groups, ranks })
    }
}

impl fmt::Display for RankGroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.groups, self.ranks)
    }
}

/// The nodes of a hybrid layout, each with at least one rank: rank r is on node r / P.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NodeLayout {
    /// N
    pub nodes: u16,
    /// P: ranks per node.
    pub width: u16,
    /// The number of chunks used to overlap the two levels; `None` runs one level after the other.
    chunks: Option<u16>,
}

impl NodeLayout {
    /// Parses `NODESxRANKS` or `NODESxRANKS:CHUNKS`.
    fn parse(text: &str) -> Option<Self> {
        let (shape, chunks) = text.split_once(':').map_or((text, None), |(shape, chunks)| (shape, Some(chunks)));
        let (nodes, width) = shape.split_once('x')?;
        let count = |text: &str| text.parse::<u16>().ok().filter(|&count| count > 0);
        let (nodes, width) = (count(nodes)?, count(width)?);
        let chunks = match chunks.map(|chunks| count(chunks).filter(|&chunks| usize::from(chunks) <= MAX_CHUNKS)) {
            Some(None) => return None,
            chunks => chunks.flatten(),
        };
        nodes.checked_mul(width)?;
        Some(Self { nodes, width, chunks })
    }
}

impl FromStr for NodeLayout {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let expected = || format!("NODESxRANKS or, fused, NODESxRANKS:CHUNKS with 1 to {MAX_CHUNKS} chunks");
        Self::parse(text).ok_or_else(|| UnknownName::new(text, "a layout of nodes", expected()))
    }
}

impl fmt::Display for NodeLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.nodes, self.width)?;
        self.chunks.map_or(Ok(()), |chunks| write!(f, ":{chunks}"))
    }
}

/// The layouts that need collectives of their own and that a unit can switch to.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SwitchTargets {
    /// Groups of ranks that step independently.
    pub groups: Vec<RankGroups>,
    /// The nodes of the hybrid layout. If set, the unit's placements are over ranks, even while experts are hybrid: a
    /// node then has the experts of its ranks.
    pub hybrid: Option<NodeLayout>,
}

impl SwitchTargets {
    /// Returns whether there are no such layouts.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty() && self.hybrid.is_none()
    }
}

impl FromStr for ExpertLayout {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let nodes = || text.strip_prefix("hybrid:").and_then(NodeLayout::parse);
        let unknown = || {
            let expected = format!(
                "ep, tp, hybrid:NODESxRANKS, or (fused) hybrid:NODESxRANKS:CHUNKS with 1 to {MAX_CHUNKS} chunks"
            );
            UnknownName::new(text, "an expert layout", expected)
        };
        match text {
            "ep" => Ok(Self::Ep),
            "tp" => Ok(Self::Tp),
            _ => nodes().map(Self::Hybrid).ok_or_else(unknown),
        }
    }
}

impl ExpertLayout {
    /// The nodes of a hybrid layout.
    pub(crate) fn nodes(self) -> Option<NodeLayout> {
        match self {
            Self::Ep | Self::Tp | Self::Groups(_) => None,
            Self::Hybrid(nodes) => Some(nodes),
        }
    }

    /// The independent groups, if the layout has them.
    pub(crate) fn groups(self) -> Option<RankGroups> {
        match self {
            Self::Groups(groups) => Some(groups),
            _ => None,
        }
    }

    /// Whether every rank has a slice of every expert.
    pub(crate) fn is_sliced(self) -> bool {
        matches!(self, Self::Tp | Self::Groups(_))
    }

    /// The number of placement groups for `world` ranks.
    pub(crate) fn hosts(self, world: usize) -> usize {
        self.nodes().map_or(world, |layout| layout.nodes.into())
    }

    /// Ranks per placement group.
    fn width(self) -> usize {
        self.nodes().map_or(1, |layout| layout.width.into())
    }

    /// The number of ranks that a placement with `groups` groups requires.
    pub(crate) fn world(self, groups: usize) -> usize {
        groups * self.width()
    }

    /// The placement group that a rank belongs to.
    pub(crate) fn host(self, rank: usize) -> usize {
        rank / self.width()
    }

    /// Converts a sender's index in the collectives of `rank` to its rank in the unit.
    pub(super) fn source(self, rank: usize, named: usize) -> usize {
        match self {
            Self::Ep | Self::Tp => named,
            Self::Hybrid(_) => self.host(rank) * self.width() + named,
            Self::Groups(groups) => rank - rank % usize::from(groups.ranks) + named,
        }
    }

    /// Maximum number of messages into which the rows for one host are split.
    pub(super) fn messages(self) -> usize {
        self.nodes().and_then(|layout| layout.chunks).map_or(1, usize::from)
    }

    /// Creates a rank's collectives over its link; `observer` is notified of the stages of a hybrid dispatch and
    /// combine. A hybrid dispatch sends rows between the ranks of a node as messages, even if they share `memory`. All
    /// ranks must call this at the same time.
    ///
    /// # Errors
    /// The ranks disagree on the division into nodes, or a rank is lost.
    pub fn join<T: Element>(
        self,
        link: impl Lockstep + 'static,
        memory: impl RowMemory<T> + 'static,
        observer: Box<dyn StageObserver + Send>,
    ) -> Result<Box<dyn Collectives<T>>, UnitError> {
        let Some(layout) = self.nodes() else { return Ok(Box::new(RowCollectives::new(link, memory))) };
        let link = UnitLink::join(link, layout.nodes.into())?;
        let unit = Box::new(RowCollectives::new(link.clone(), memory));
        Ok(match layout.chunks {
            Some(chunks) => Box::new(HybridCollectives::fused(link, unit, chunks.into())?.observed_by(observer)),
            None => {
                let inside = PrivateMemory::new(link.grid().local(link.rank()));
                Box::new(HybridCollectives::unfused(link, unit, inside).observed_by(observer))
            }
        })
    }

    /// Creates a rank's collectives over its link, with rows sent in the type of `wire` and attention tp in `groups`
    /// groups of consecutive ranks. Within a group, rows are reduced and gathered in messages.
    ///
    /// # Errors
    /// The ranks disagree on the division into nodes, a rank is lost, or `groups` does not divide the number of ranks.
    pub fn join_grouped<T: Element>(
        self,
        groups: usize,
        wire: fn(Box<dyn Collectives<T>>) -> WireRows,
        link: impl Lockstep + 'static,
        memory: impl RowMemory<T> + 'static,
        observer: Box<dyn StageObserver + Send>,
    ) -> Result<WireRows, UnitError> {
        if groups == 1 {
            return self.join(link, memory, observer).map(wire);
        }
        let link = UnitLink::join(link, groups)?;
        let unit = wire(self.join(link.clone(), memory, observer)?);
        let inside = PrivateMemory::new(link.grid().local(link.rank()));
        let group = wire(Box::new(RowCollectives::of_group(link.inside(), inside)));
        Ok(unit.with_groups(link, group))
    }
}

/// A rank's collectives in every layout that the unit can have.
pub struct SwitchableRows {
    /// Collectives of the initial layout or, in a unit with targets, of experts ep and tp.
    pub unit: WireRows,
    /// Collectives of each target.
    pub targets: Vec<(ExpertLayout, WireRows)>,
}

impl SwitchableRows {
    /// Creates the collectives among all ranks and those of each target, over one link. Within groups and nodes, rows
    /// are sent as messages. `observer` observes the stages of a hybrid dispatch and combine.
    ///
    /// # Errors
    /// See [`ExpertLayout::join`]; also fails if groups do not divide the ranks.
    pub fn join<T: Element>(
        targets: &SwitchTargets,
        wire: fn(Box<dyn Collectives<T>>) -> WireRows,
        link: impl Lockstep + 'static,
        memory: impl RowMemory<T> + 'static,
        observer: Box<dyn StageObserver + Send>,
    ) -> Result<Self, UnitError> {
        let shared = UnitLink::join(link, 1)?;
        let mut rows_of = Vec::new();
        for groups in &targets.groups {
            let link = UnitLink::join(shared.clone(), groups.groups.into())?;
            let inside = PrivateMemory::new(link.grid().local(link.rank()));
            let rows = wire(Box::new(RowCollectives::of_group(link.inside(), inside)));
            rows_of.push((ExpertLayout::Groups(*groups), rows));
        }
        if let Some(layout) = targets.hybrid.map(ExpertLayout::Hybrid) {
            let private = PrivateMemory::new(shared.rank());
            rows_of.push((layout, wire(layout.join(shared.clone(), private, observer)?)));
        }
        Ok(Self { unit: wire(Box::new(RowCollectives::new(shared, memory))), targets: rows_of })
    }
}

impl From<WireRows> for SwitchableRows {
    fn from(unit: WireRows) -> Self {
        Self { unit, targets: Vec::new() }
    }
}

impl fmt::Display for ExpertLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ep => f.write_str("ep"),
            Self::Tp => f.write_str("tp"),
            Self::Groups(groups) => write!(f, "tp:{groups}"),
            Self::Hybrid(nodes) => write!(f, "hybrid:{nodes}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_have_names_and_others_are_refused() {
        for name in ["ep", "tp", "hybrid:1x1", "hybrid:2x3", "hybrid:2x3:64"] {
            assert_eq!(name.parse::<ExpertLayout>().unwrap().to_string(), name);
        }
        for name in [
            "",
            "EP",
            "hybrid",
            "hybrid:2",
            "hybrid:0x2",
            "hybrid:2x0",
            "hybrid:2x2:0",
            "hybrid:2x2:65",
            "hybrid:2x2:",
            "hybrid:300x300",
            "hybrid:-1x2",
        ] {
            let error = name.parse::<ExpertLayout>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("'{name}' is not an expert layout: expected ep, tp, ")), "{error}");
        }
        assert_eq!("2x3:4".parse::<NodeLayout>().unwrap().to_string(), "2x3:4");
        let error = "hybrid:2x2".parse::<NodeLayout>().unwrap_err().to_string();
        assert!(error.starts_with("'hybrid:2x2' is not a layout of nodes: expected NODESxRANKS or"), "{error}");
    }

    #[test]
    fn groups_have_two_ranks_at_least_and_divide_the_world() {
        let groups = RankGroups::new(2, 4).unwrap();
        assert_eq!(
            (groups, ExpertLayout::Groups(groups).to_string()),
            (RankGroups { groups: 2, ranks: 2 }, "tp:2x2".into())
        );
        assert!([0, 1, 3, 4, 5].into_iter().all(|groups| RankGroups::new(groups, 4).is_none()));
        assert_eq!([0, 1].map(|local| ExpertLayout::Groups(groups).source(3, local)), [2, 3]);
    }

    #[test]
    fn a_hybrid_rank_belongs_to_its_node() {
        let layout: ExpertLayout = "hybrid:3x2".parse().unwrap();
        assert_eq!((layout.hosts(6), layout.world(3), layout.host(3)), (3, 6, 1));
        assert_eq!([0, 1].map(|local| layout.source(3, local)), [2, 3]);
        assert_eq!((ExpertLayout::Ep.hosts(6), ExpertLayout::Tp.world(6), ExpertLayout::Ep.host(3)), (6, 6, 3));
    }
}
