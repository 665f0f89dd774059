//! Hybrid TP-EP: an expert belongs to a node and is sliced over the node's ranks (MixServe, section III-C).
//!
//! A row crosses once to each node that needs it, to the rank with the same local index as the row's own rank, and the
//! ranks of that node gather it. Their partial sums are added on that same rank, which sends the result back. In both
//! directions each rank therefore carries 1/P of the traffic between nodes. MixServe cuts rows into P columns, because
//! attention TP leaves each row on all ranks of a node. Here each row is on one rank only (a rank's own tokens, or the
//! result of a reduce-scatter), so rows are divided rather than columns, and the combine needs no allgather after it.
//! `hybrid_dispatch` and `hybrid_combine` in `tests/reference` define the results bit for bit.
//!
//! | exchange | between nodes | inside a node |
//! |---|---|---|
//! | unfused | dispatch and combine of the group across nodes | dispatch and combine of the group inside the node, before or after |
//! | fused: AG-Dispatch, RS-Combine | one piece | at the same time, the previous piece (gather) or the next one (reduce) |

mod fused;
mod pieces;
mod stage;
mod step;
mod unfused;

use super::group::UnitLink;
use super::lockstep::{Lockstep, UnitError};
use super::memory::{PrivateMemory, RowMemory};
use super::rows::RowCollectives;
use super::{AllRows, Collectives, Norm, OwnRows, Received};
use crate::dispatch::DispatchPlan;
use crate::element::Element;
use crate::lockstep_through;
use crate::split::RowSplit;
use fused::Fused;
use unfused::Unfused;

pub use stage::{Stage, StageName, StageObserver, Unobserved};

/// Maximum number of chunks into which a fused exchange divides the rows from one node to another.
pub const MAX_CHUNKS: usize = 64;

/// A unit's collectives, where dispatch and combine work by node, or reduce-scatter and allgather by group. By node,
/// the plan covers the N nodes, and all ranks of a node receive the same rows, ordered by the source's local index,
/// then by its node. The other collectives are the unit's.
pub struct HybridCollectives<L, T> {
    link: UnitLink<L>,
    /// Used by reduce-scatter and allgather.
    rows: Box<dyn Collectives<T>>,
    route: Route<L, T>,
}

/// How dispatch and combine work.
enum Route<L, T> {
    Unit(Box<dyn Collectives<T>>),
    Unfused(Box<Unfused<T>>),
    Fused(Box<Fused<L, T>>),
}

impl<L: Lockstep + 'static, T: Element> HybridCollectives<L, T> {
    /// Creates collectives for attention in groups of ranks: heads are summed and rows gathered inside each group, and
    /// tokens are sent to experts anywhere. Splits for reduce-scatter and allgather cover the ranks of the group;
    /// groups run them concurrently, each on its own rows. `unit` and `group` use clones of the link.
    pub fn grouped(link: UnitLink<L>, unit: Box<dyn Collectives<T>>, group: Box<dyn Collectives<T>>) -> Self {
        Self { link, rows: group, route: Route::Unit(unit) }
    }

    /// Creates collectives that run one level after the other. `unit` uses a clone of the link; `inside` is memory
    /// shared only by the ranks of this node, indexed by local index, and used by no other collectives.
    pub fn unfused(link: UnitLink<L>, unit: Box<dyn Collectives<T>>, inside: impl RowMemory<T> + 'static) -> Self {
        let across = RowCollectives::of_group(link.across(), PrivateMemory::new(link.grid().node(link.rank())));
        let inside = RowCollectives::of_group(link.inside(), inside);
        let route = Route::Unfused(Box::new(Unfused::new(Box::new(across), Box::new(inside))));
        Self { link, rows: unit, route }
    }

    /// Creates collectives that run both levels concurrently. The rows from one node to another are divided into
    /// `chunks` chunks, equal on every rank. Rows travel in messages at both levels.
    ///
    /// # Errors
    /// If there are no chunks, or more than [`MAX_CHUNKS`].
    pub fn fused(link: UnitLink<L>, unit: Box<dyn Collectives<T>>, chunks: usize) -> Result<Self, UnitError> {
        if chunks == 0 || chunks > MAX_CHUNKS {
            let detail = format!("{chunks} chunks of rows, expected 1 to {MAX_CHUNKS}");
            return Err(UnitError::Operands { rank: link.rank(), detail });
        }
        let route = Route::Fused(Box::new(Fused::new(link.clone(), chunks)));
        Ok(Self { link, rows: unit, route })
    }

    /// Sets the observer of every dispatch and combine by node.
    #[must_use]
    pub fn observed_by(mut self, observer: Box<dyn StageObserver + Send>) -> Self {
        match &mut self.route {
            Route::Unit(_) => {}
            Route::Unfused(unfused) => unfused.observer = observer,
            Route::Fused(fused) => fused.observer = observer,
        }
        self
    }
}

impl<L: Lockstep + 'static, T: Element> Collectives<T> for HybridCollectives<L, T> {
    fn part(&mut self, len: usize) -> Result<&mut [T], UnitError> {
        self.rows.part(len)
    }

    fn reduce_scatter(
        &mut self,
        hidden: usize,
        split: RowSplit<'_>,
        norm: Option<Norm<'_, T>>,
        out: &mut [T],
    ) -> Result<(), UnitError> {
        self.rows.reduce_scatter(hidden, split, norm, out)
    }

    fn allgather(&mut self, own: OwnRows<'_, T>, split: RowSplit<'_>, out: AllRows<'_, T>) -> Result<(), UnitError> {
        self.rows.allgather(own, split, out)
    }

    fn dispatch(&mut self, x: &[T], hidden: usize, plan: &DispatchPlan) -> Result<(), UnitError> {
        let rank = self.link.rank();
        UnitError::check(rank, "the rows", x.len(), plan.tokens() * hidden)?;
        if let Route::Unfused(_) | Route::Fused(_) = self.route {
            UnitError::check(rank, "the nodes of the plan", plan.ranks(), self.link.grid().nodes())?;
        }
        match &mut self.route {
            Route::Unit(unit) => unit.dispatch(x, hidden, plan),
            Route::Unfused(unfused) => unfused.dispatch(x, hidden, plan),
            Route::Fused(fused) => fused.dispatch(x, hidden, plan),
        }
    }

    fn received(&mut self) -> Received<'_, T> {
        match &mut self.route {
            Route::Unit(unit) => unit.received(),
            Route::Unfused(unfused) => unfused.received(),
            Route::Fused(fused) => fused.received(),
        }
    }

    fn combine(&mut self, plan: &DispatchPlan, out: &mut [T]) -> Result<(), UnitError> {
        match &mut self.route {
            Route::Unit(unit) => unit.combine(plan, out),
            Route::Unfused(unfused) => unfused.combine(plan, out),
            Route::Fused(fused) => fused.combine(plan, out),
        }
    }
}

lockstep_through!([L: Lockstep, T: Element] HybridCollectives<L, T>, end => end.link);
