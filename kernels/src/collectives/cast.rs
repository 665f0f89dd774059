//! Exchanges rows in a different type than the caller's.

use super::lockstep::{Lockstep, UnitError};
use super::{AllRows, Collectives, Norm, OwnRows, Received, ReceivedRows};
use crate::dispatch::DispatchPlan;
use crate::element::Element;
use crate::lockstep_through;
use crate::split::RowSplit;
use crate::vector::{NormRow, norm_row};

/// Exchanges a caller's rows of `A` through collectives of `B`: every row is rounded to `B` before it is sent, sums are
/// computed as for `B`, and received rows are widened. For example, f32 rows take half the bytes as bf16. A rank's own
/// rows are rounded like those it sends, so results do not depend on which rank computes them, and all ranks gather
/// equal rows.
pub struct CastCollectives<A, B> {
    unit: Box<dyn Collectives<B>>,
    part: Vec<A>,
    /// Rows to send.
    sent: Vec<B>,
    /// Rows received.
    received: Vec<B>,
    /// The rows of the last dispatch, by source.
    rows: Vec<A>,
    /// `[R]`: the index of each row of `rows` among its source's rows.
    places: Vec<u32>,
    sums: Vec<A>,
    /// Scratch of the fused norm.
    wide_row: Vec<f32>,
}

impl<A: Element, B: Element> CastCollectives<A, B> {
    /// Wraps a unit whose rows are `B`.
    pub fn new(unit: Box<dyn Collectives<B>>) -> Self {
        Self {
            unit,
            part: Vec::new(),
            sent: Vec::new(),
            received: Vec::new(),
            rows: Vec::new(),
            places: Vec::new(),
            sums: Vec::new(),
            wide_row: Vec::new(),
        }
    }

    /// Norms the received sums. The residual is not sent and keeps its type.
    fn norm_rows(&mut self, hidden: usize, split: RowSplit<'_>, norm: Norm<'_, A>, out: &mut [A]) {
        let Norm { residual, weight, epsilon, residual_out } = norm;
        self.wide_row.resize(hidden, 0.0);
        let width = hidden.max(1);
        let rows = self.received.chunks_exact(width).zip(out.chunks_exact_mut(width));
        let rows = rows.zip(residual_out.chunks_exact_mut(width)).zip(split.positions(self.unit.rank()));
        for (((received, out), residual_out), position) in rows {
            cast(received, &mut self.wide_row);
            let residual = &residual[split.token(position) * hidden..][..hidden];
            norm_row(NormRow { sum: &mut self.wide_row, residual, weight, epsilon, residual_out, out });
        }
    }
}

/// Converts all elements; both slices must have the same length.
fn cast<A: Element, B: Element>(from: &[A], to: &mut [B]) {
    to.iter_mut().zip(from).for_each(|(to, value)| *to = B::round(value.widen()));
}

fn cast_into<A: Element, B: Element>(from: &[A], to: &mut Vec<B>) {
    to.clear();
    to.extend(from.iter().map(|value| B::round(value.widen())));
}

impl<A: Element, B: Element> Collectives<A> for CastCollectives<A, B> {
    fn part(&mut self, len: usize) -> Result<&mut [A], UnitError> {
        // Fail before the caller computes rows that would not fit.
        self.unit.part(len)?;
        self.part.resize(len, A::zeroed());
        Ok(&mut self.part)
    }

    fn reduce_scatter(
        &mut self,
        hidden: usize,
        split: RowSplit<'_>,
        norm: Option<Norm<'_, A>>,
        out: &mut [A],
    ) -> Result<(), UnitError> {
        let me = self.unit.rank();
        norm.iter().try_for_each(|norm| norm.check(me, self.part.len(), out.len(), hidden))?;
        cast(&self.part, self.unit.part(self.part.len())?);
        self.received.resize(out.len(), B::zeroed());
        self.unit.reduce_scatter(hidden, split, None, &mut self.received)?;
        match norm {
            None => cast(&self.received, out),
            Some(norm) => self.norm_rows(hidden, split, norm, out),
        }
        Ok(())
    }

    fn allgather(&mut self, own: OwnRows<'_, A>, split: RowSplit<'_>, out: AllRows<'_, A>) -> Result<(), UnitError> {
        let OwnRows { rows, hidden, labels, width, bound } = own;
        cast_into(rows, &mut self.sent);
        self.received.resize(out.rows.len(), B::zeroed());
        let own = OwnRows { rows: &self.sent, hidden, labels, width, bound };
        self.unit.allgather(own, split, AllRows { rows: &mut self.received, labels: out.labels })?;
        cast(&self.received, out.rows);
        Ok(())
    }

    fn dispatch(&mut self, x: &[A], hidden: usize, plan: &DispatchPlan) -> Result<(), UnitError> {
        cast_into(x, &mut self.sent);
        self.unit.dispatch(&self.sent, hidden, plan)?;
        let Received { rows, sums, .. } = self.unit.received();
        self.rows.clear();
        self.places.clear();
        for row in 0..rows.len() {
            self.rows.extend(rows.row(row).iter().map(|value| A::round(value.widen())));
            self.places.push((row - rows.of_source(rows.source(row)).start) as u32);
        }
        self.sums.resize(sums.len(), A::zeroed());
        Ok(())
    }

    fn received(&mut self) -> Received<'_, A> {
        let Received { rows, pair_rows, experts, weights, .. } = self.unit.received();
        let ReceivedRows { hidden, offsets, sources, .. } = rows;
        let of_source = offsets.windows(2).map(|ends| &self.rows[ends[0] as usize * hidden..ends[1] as usize * hidden]);
        let rows = ReceivedRows { hidden, offsets, places: &self.places, sources, bases: of_source.collect() };
        Received { rows, pair_rows, experts, weights, sums: &mut self.sums }
    }

    fn combine(&mut self, plan: &DispatchPlan, out: &mut [A]) -> Result<(), UnitError> {
        cast(&self.sums, self.unit.received().sums);
        self.received.resize(out.len(), B::zeroed());
        self.unit.combine(plan, &mut self.received)?;
        cast(&self.received, out);
        Ok(())
    }
}

lockstep_through!([A: Element, B: Element] CastCollectives<A, B>, end => end.unit);
