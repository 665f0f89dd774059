//! The layout of attention and experts over the ranks of a unit, from one rank's view.

use std::sync::Arc;

use semmoe_tables::{Attention, Tables};
use serde::{Deserialize, Serialize};

use super::config::ModelConfig;
use super::error::ModelError;
use super::expert::Place;
use super::rows::RowPlan;
use super::slices::HeadSlice;
use crate::ep::ExpertLayout;

/// The experts' layout, and a rank's capacity for them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExpertRoom {
    /// The initial layout.
    pub layout: ExpertLayout,
    /// Maximum whole experts of a layer that any rank may have after a switch; at least as many as in the initial
    /// placement, which is also the default.
    pub slots: Option<u16>,
    /// Limit on experts in memory: the rank reads the others from the checkpoint, ahead of their layer. Without it all
    /// are in memory, and can be moved.
    pub memory: Option<ExpertMemory>,
}

/// A limit on the experts in a rank's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExpertMemory {
    /// As many as fit into this many bytes, together with two layers of streamed experts and a buffer to read one
    /// expert.
    Bytes(u64),
    /// This many of each layer.
    Resident(usize),
}

impl From<ExpertLayout> for ExpertRoom {
    fn from(layout: ExpertLayout) -> Self {
        Self { layout, slots: None, memory: None }
    }
}

/// Attention, and how many ranks share it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AttentionShape {
    /// dp: a rank has all heads of its own sequences; tp: it has its slice of the heads of its group's sequences.
    pub attention: Attention,
    /// Ranks of a group with sequences of its own; 1 with dp.
    pub ranks: usize,
}

/// Layout of attention over the ranks.
pub(super) struct AttentionLayout {
    pub(super) heads: HeadSlice,
    /// Ranks that have the same sequences.
    pub(super) ranks: usize,
    /// With attention tp: which rows go to which rank.
    pub(super) rows: Option<RowPlan>,
}

/// A rank's layout of attention; converted from [`Attention`] it has no tables, and cannot switch.
pub struct AttentionPlan {
    /// The initial layout. With dp every rank has all heads. With tp it has its slice of every layer's heads, all ranks
    /// of a group run the same steps, and from attention to the next layer each continues with some of the rows.
    pub start: Attention,
    /// Whether the rank can switch to the other one: it then has the weights of both, which takes the memory of
    /// attention once more, divided by the ranks.
    pub both: bool,
    /// With tp: size of the groups of neighbouring ranks that have their own sequences; `None` if all ranks form one
    /// group.
    pub group: Option<usize>,
    /// Ranks of each kind of independent group that the rank can switch to, with weights for each.
    pub groups: Vec<usize>,
    /// With tp: the tables that place rows on ranks, which must match the model and the placement; without them rows
    /// are split evenly.
    pub tables: Option<Arc<Tables>>,
}

impl From<Attention> for AttentionPlan {
    fn from(start: Attention) -> Self {
        Self { start, both: false, group: None, groups: Vec::new(), tables: None }
    }
}

impl AttentionLayout {
    /// This rank's layout for one kind of attention of a plan.
    fn new(config: &ModelConfig, at: Place, plan: &AttentionPlan, attention: Attention) -> Result<Self, ModelError> {
        match attention {
            Attention::Dp => Ok(Self { heads: HeadSlice::ALL, ranks: 1, rows: None }),
            Attention::Tp => Self::of_group(config, at, plan.group.unwrap_or(at.world), plan.tables.clone()),
        }
    }

    /// Tensor parallelism in groups of `ranks` ranks.
    fn of_group(
        config: &ModelConfig,
        at: Place,
        ranks: usize,
        tables: Option<Arc<Tables>>,
    ) -> Result<Self, ModelError> {
        let heads = HeadSlice::new(config, at.rank % ranks, ranks)?;
        Ok(Self { heads, ranks, rows: Some(RowPlan::new(ranks, tables)) })
    }

    /// The initial layout, those that attention may switch to, and the heads of all.
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

/// The heads that a rank computes initially, and those after a switch of attention.
pub(super) struct HeadSlices {
    pub(super) start: HeadSlice,
    pub(super) other: Option<HeadSlice>,
    /// In groups of ranks, after `other`.
    pub(super) in_groups: Vec<HeadSlice>,
}
