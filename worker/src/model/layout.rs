//! The layout of attention and experts across a unit's ranks, from one rank's view.

use std::sync::Arc;

use semmoe_tables::{Attention, Tables};
use serde::{Deserialize, Serialize};

use super::config::ModelConfig;
use super::error::ModelError;
use super::expert::Place;
use super::rows::RowPlan;
use super::slices::HeadSlice;
use crate::ep::{ExpertLayout, NodeLayout};

/// The expert layout, and a rank's capacity for experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExpertRoom {
    /// The initial layout.
    pub layout: ExpertLayout,
    /// Maximum number of whole experts per layer that any rank may have after a switch. The default, which is also the
    /// minimum, is the maximum in the initial placement.
    pub slots: Option<u16>,
    /// Limit on resident experts; the rank streams the others from the checkpoint, ahead of their layer. Without a
    /// limit all experts are resident and can be moved.
    pub memory: Option<ExpertMemory>,
    /// The hybrid nodes that the unit can switch to, or starts with and can leave. Placements are then over ranks in
    /// every layout.
    pub hybrid: Option<NodeLayout>,
}

/// A limit on the experts resident in a rank's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExpertMemory {
    /// As many as fit into this many bytes, which must also hold two layers of streamed experts and a buffer for
    /// reading one expert.
    Bytes(u64),
    /// A fixed number of experts per layer.
    Resident(usize),
}

impl From<ExpertLayout> for ExpertRoom {
    fn from(layout: ExpertLayout) -> Self {
        Self { layout, slots: None, memory: None, hybrid: None }
    }
}

/// Attention, and the number of ranks that share it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AttentionShape {
    /// With dp, a rank computes all heads of its own sequences; with tp, its slice of the heads of its group's
    /// sequences.
    pub attention: Attention,
    /// Number of ranks in a group that shares sequences; 1 with dp.
    pub ranks: usize,
}

/// The attention layout across the ranks.
pub(super) struct AttentionLayout {
    pub(super) heads: HeadSlice,
    /// Number of ranks that run the same sequences.
    pub(super) ranks: usize,
    /// With attention tp, plans which rows go to which rank.
    pub(super) rows: Option<RowPlan>,
}

/// A rank's attention layouts. Converted from [`Attention`], a plan has no tables and does not allow switching.
pub struct AttentionPlan {
    /// The initial layout. With dp, every rank has all heads. With tp, each rank has its slice of every layer's heads,
    /// all ranks of a group run the same steps, and between attention and the next layer each rank continues with only
    /// some of the rows.
    pub start: Attention,
    /// Whether the rank can switch between dp and tp. It then stores the weights for both, which increases its
    /// attention memory by `1 / ranks` over that of dp.
    pub both: bool,
    /// With tp, the size of groups of neighbouring ranks that each have their own sequences; `None` if all ranks form
    /// one group.
    pub group: Option<usize>,
    /// Sizes of the independent groups that the rank can switch to; it stores head weights for each size.
    pub groups: Vec<usize>,
    /// With tp, the tables that assign rows to ranks; they must match the model and the placement. Without tables, rows
    /// are split evenly.
    pub tables: Option<Arc<Tables>>,
}

impl From<Attention> for AttentionPlan {
    fn from(start: Attention) -> Self {
        Self { start, both: false, group: None, groups: Vec::new(), tables: None }
    }
}

impl AttentionLayout {
    /// Creates this rank's layout for dp or tp as specified by a plan.
    fn new(config: &ModelConfig, at: Place, plan: &AttentionPlan, attention: Attention) -> Result<Self, ModelError> {
        match attention {
            Attention::Dp => Ok(Self { heads: HeadSlice::ALL, ranks: 1, rows: None }),
            Attention::Tp => Self::of_group(config, at, plan.group.unwrap_or(at.world), plan.tables.clone()),
        }
    }

    /// Creates this rank's layout for tensor parallelism in groups of `ranks` ranks.
    fn of_group(
        config: &ModelConfig,
        at: Place,
        ranks: usize,
        tables: Option<Arc<Tables>>,
    ) -> Result<Self, ModelError> {
        let heads = HeadSlice::new(config, at.rank % ranks, ranks)?;
        Ok(Self { heads, ranks, rows: Some(RowPlan::new(ranks, tables)) })
    }

    /// Returns the initial layout, the layouts that attention can switch to, and the head slices of all of them.
    pub(super) fn all(
        config: &ModelConfig,
        at: Place,
        plan: &AttentionPlan,
    ) -> Result<(Self, Vec<Self>, HeadSlices), ModelError> {
        let of = |attention| Self::new(config, at, plan, attention);
        let (layout, other) = (of(plan.start)?, plan.both.then(|| of(plan.start.other())).transpose()?);
        let groups = plan.groups.iter().map(|&ranks| Self::of_group(config, at, ranks, None));
        let groups = groups.collect::<Result<Vec<_>, _>>()?;
        let heads = |layout: &Self| layout.heads;
        let slices = HeadSlices {
            start: layout.heads,
            other: other.as_ref().map(heads),
            in_groups: groups.iter().map(heads).collect(),
        };
        Ok((layout, other.into_iter().chain(groups).collect(), slices))
    }

    pub(super) fn shape(&self) -> AttentionShape {
        AttentionShape { attention: self.attention(), ranks: self.ranks }
    }

    pub(super) fn attention(&self) -> Attention {
        if self.rows.is_some() { Attention::Tp } else { Attention::Dp }
    }
}

/// A rank's head slices: the initial one, and those it needs after attention switches.
pub(super) struct HeadSlices {
    pub(super) start: HeadSlice,
    pub(super) other: Option<HeadSlice>,
    /// One slice per independent group size.
    pub(super) in_groups: Vec<HeadSlice>,
}
