//! Runs one level after the other, using each group's collectives: the baseline for the fused exchange.

use super::stage::{Stage, StageName, StageObserver, Unobserved};
use crate::collectives::{Collectives, Received, UnitError};
use crate::dispatch::DispatchPlan;
use crate::element::Element;

/// Dispatches across nodes, then to all ranks of the node; combines in reverse order.
pub(super) struct Unfused<T> {
    pub(super) across: Box<dyn Collectives<T>>,
    pub(super) inside: Box<dyn Collectives<T>>,
    /// The rows to forward to the ranks of the node.
    forward: DispatchPlan,
    rows: Vec<T>,
    pairs: Vec<u16>,
    pub(super) observer: Box<dyn StageObserver + Send>,
}

impl<T: Element> Unfused<T> {
    pub(super) fn new(across: Box<dyn Collectives<T>>, inside: Box<dyn Collectives<T>>) -> Self {
        let (forward, observer) = (DispatchPlan::default(), Box::new(Unobserved));
        Self { across, inside, forward, rows: Vec::new(), pairs: Vec::new(), observer }
    }

    pub(super) fn dispatch(&mut self, x: &[T], hidden: usize, plan: &DispatchPlan) -> Result<(), UnitError> {
        observed(&mut *self.observer, StageName::Dispatch, || self.across.dispatch(x, hidden, plan))?;
        let Received { rows, pair_rows, experts, weights, .. } = self.across.received();
        self.rows.clear();
        (0..rows.len()).for_each(|row| self.rows.extend_from_slice(rows.row(row)));
        self.pairs.clear();
        self.pairs.resize(rows.len(), 0);
        pair_rows.iter().for_each(|&row| self.pairs[row as usize] += 1);
        self.forward
            .build_forward(&self.pairs, experts, weights, self.inside.world())
            .expect("received rows have been validated");
        observed(&mut *self.observer, StageName::Gather, || self.inside.dispatch(&self.rows, hidden, &self.forward))
    }

    pub(super) fn received(&mut self) -> Received<'_, T> {
        self.inside.received()
    }

    pub(super) fn combine(&mut self, plan: &DispatchPlan, out: &mut [T]) -> Result<(), UnitError> {
        let sums = self.across.received().sums;
        observed(&mut *self.observer, StageName::Reduce, || self.inside.combine(&self.forward, sums))?;
        observed(&mut *self.observer, StageName::Combine, || self.across.combine(plan, out))
    }
}

fn observed<R>(observer: &mut dyn StageObserver, name: StageName, work: impl FnOnce() -> R) -> R {
    let stage = Stage { name, piece: 0 };
    observer.began(stage);
    let result = work();
    observer.ended(stage);
    result
}
