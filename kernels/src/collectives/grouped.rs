//! Attention in groups of ranks: heads are summed and rows gathered inside each group, tokens go to experts anywhere.

use super::lockstep::{Lockstep, UnitError};
use super::{AllRows, Collectives, Norm, OwnRows, Received};
use crate::dispatch::DispatchPlan;
use crate::element::Element;
use crate::lockstep_through;
use crate::split::RowSplit;

/// The collectives of a unit in which reduce-scatter and allgather are those of this rank's group: their splits are
/// over the ranks of the group. Groups make them at the same time, each with rows of its own.
pub struct GroupedCollectives<L, T> {
    link: L,
    unit: Box<dyn Collectives<T>>,
    group: Box<dyn Collectives<T>>,
}

impl<L: Lockstep, T: Element> GroupedCollectives<L, T> {
    /// The collectives of all ranks and those of this rank's group, both over the unit's link.
    pub fn new(link: L, unit: Box<dyn Collectives<T>>, group: Box<dyn Collectives<T>>) -> Self {
        Self { link, unit, group }
    }
}

impl<L: Lockstep, T: Element> Collectives<T> for GroupedCollectives<L, T> {
    fn part(&mut self, len: usize) -> Result<&mut [T], UnitError> {
        self.group.part(len)
    }

    fn reduce_scatter(
        &mut self,
        hidden: usize,
        split: RowSplit<'_>,
        norm: Option<Norm<'_, T>>,
        out: &mut [T],
    ) -> Result<(), UnitError> {
        self.group.reduce_scatter(hidden, split, norm, out)
    }

    fn allgather(&mut self, own: OwnRows<'_, T>, split: RowSplit<'_>, out: AllRows<'_, T>) -> Result<(), UnitError> {
        self.group.allgather(own, split, out)
    }

    fn dispatch(&mut self, x: &[T], hidden: usize, plan: &DispatchPlan) -> Result<(), UnitError> {
        self.unit.dispatch(x, hidden, plan)
    }

    fn received(&mut self) -> Received<'_, T> {
        self.unit.received()
    }

    fn combine(&mut self, plan: &DispatchPlan, out: &mut [T]) -> Result<(), UnitError> {
        self.unit.combine(plan, out)
    }
}

lockstep_through!([L: Lockstep, T: Element] GroupedCollectives<L, T>, end => end.link);
