//! Implements [`semmoe_kernels::collectives`] on rows in GPU memory, for compute backends on a GPU.
//!
//! Labels, splits and plans stay on the host, which must know how many rows will arrive. They travel over a
//! [`Lockstep`] in the usual messages, but without rows. Ranks therefore agree on a call, or detect a lost rank, before
//! anything is launched; only [`RoutedCollectives`] leave the plan to the GPU. Rows then move on the rank's stream,
//! between GPUs that have mapped each other's memory ([`PeerMemory`]) or over NCCL ([`Hosts`](crate::hosts::Hosts)).

mod mover;
mod peers;
mod routed;
mod space;

use semmoe_kernels::collectives::{
    AllRows, AllRowsIn, Collectives, Lockstep, NormIn, OwnRows, OwnRowsIn, PrivateMemory, Received, ReceivedIn,
    RowCollectives, UnitError,
};
use semmoe_kernels::{DispatchPlan, Element, RowSplit, lockstep_through};

pub use mover::{MoveError, Region, Room, RowMover, SentRows, SplitRows};
pub(crate) use mover::{Stream, check_room, cut, padded};
pub use peers::{LocalRank, PeerMemory, UnitRank};
pub use routed::{ArrivedRows, RoutedCollectives, RoutedMover, RoutedTokens};
pub use space::{DeviceReceived, DeviceRows, Gpu};

use crate::calls::Rows;

/// One rank's end: messages on the host, rows in its GPU's memory.
#[derive(Debug)]
pub struct DeviceCollectives<L, M, T> {
    /// Handles everything but the rows: it is called with rows of zero columns.
    unit: RowCollectives<L, PrivateMemory<T>, T>,
    mover: M,
    /// Number of elements of the last part.
    part: usize,
    sent: Sent,
}

/// The last dispatch.
#[derive(Debug, Default)]
struct Sent {
    hidden: usize,
    tokens: usize,
    places: Vec<i32>,
    sent: Vec<u32>,
    received: Vec<u32>,
}

fn rows_of<T: Element>(tokens: usize, hidden: usize) -> Rows {
    Rows { tokens: tokens as u64, hidden: hidden as u64, dtype: T::DTYPE }
}

impl Sent {
    /// Records the plan and the number of rows received from each rank.
    fn set(&mut self, plan: &DispatchPlan, hidden: usize, received: impl Iterator<Item = u32>) {
        let ranks = plan.ranks();
        (self.hidden, self.tokens) = (hidden, plan.tokens());
        self.places.clear();
        self.places.resize(self.tokens * ranks, -1);
        self.sent.clear();
        for rank in 0..ranks {
            let tokens = plan.rank(rank).tokens;
            self.sent.push(tokens.len() as u32);
            for (place, &token) in (0..).zip(tokens) {
                self.places[token as usize * ranks + rank] = place;
            }
        }
        self.received.clear();
        self.received.extend(received);
    }

    fn rows<T: Element>(&self) -> SentRows<'_> {
        let rows = rows_of::<T>(self.tokens, self.hidden);
        SentRows { rows, places: &self.places, sent: &self.sent, received: &self.received }
    }
}

impl<L: Lockstep, M: RowMover<T>, T: Element> DeviceCollectives<L, M, T> {
    /// Combines one rank's link and mover; both must span the same ranks.
    pub fn new(link: L, mover: M) -> Self {
        let memory = PrivateMemory::new(link.rank());
        Self { unit: RowCollectives::new(link, memory), mover, part: 0, sent: Sent::default() }
    }

    fn check(&self, what: &str, found: usize, expected: usize) -> Result<(), UnitError> {
        UnitError::check(self.unit.rank(), what, found, expected)
    }

    fn operands(&self, detail: String) -> UnitError {
        UnitError::Operands { rank: self.unit.rank(), detail }
    }

    /// Starts a call on split rows.
    fn split_call<'a>(&self, hidden: usize, split: RowSplit<'a>) -> Result<SplitRows<'a>, UnitError> {
        self.check_stopped()?;
        self.check("the ranks of the split", split.ranks(), self.unit.world())?;
        Ok(SplitRows { rows: rows_of::<T>(split.tokens(), hidden), split })
    }

    /// Returns the first `len` elements of a region, which must be large enough.
    fn region(&self, region: Region, len: usize) -> Result<DeviceRows<'_, T>, UnitError> {
        let mut buffer = self.mover.region(region);
        let limit = buffer.bytes as usize / size_of::<T>();
        if len > limit {
            return Err(self.operands(format!("{len} row elements exceed the {limit} that fit in its memory")));
        }
        buffer.bytes = (len * size_of::<T>()) as u64;
        Ok(DeviceRows::of(buffer))
    }

    /// Fails if a kernel of an earlier call stopped, which the driver reports for every later call.
    fn check_stopped(&self) -> Result<(), UnitError> {
        let Some(stopped) = self.mover.stopped() else { return Ok(()) };
        Err(match stopped.late() {
            Some(peer) => UnitError::lost(peer, stopped.to_string()),
            None => self.operands(stopped.to_string()),
        })
    }

    fn run<R>(&mut self, call: impl FnOnce(&mut M, &Sent) -> Result<R, MoveError>) -> Result<R, UnitError> {
        let refused = match call(&mut self.mover, &self.sent) {
            Ok(done) => return Ok(done),
            Err(refused) => refused,
        };
        self.check_stopped()?;
        Err(self.operands(refused.to_string()))
    }
}

impl<L: Lockstep, M: RowMover<T>, T: Element> Collectives<T, Gpu> for DeviceCollectives<L, M, T> {
    fn part(&mut self, len: usize) -> Result<DeviceRows<'_, T>, UnitError> {
        self.part = len;
        self.region(Region::Rows, len)
    }

    fn reduce_scatter(
        &mut self,
        hidden: usize,
        split: RowSplit<'_>,
        norm: Option<NormIn<'_, T, Gpu>>,
        out: DeviceRows<'_, T>,
    ) -> Result<(), UnitError> {
        let me = self.unit.rank();
        let call = self.split_call(hidden, split)?;
        self.check("the part", self.part, split.tokens() * hidden)?;
        self.check("out", out.len(), split.positions(me).len() * hidden)?;
        norm.iter().try_for_each(|norm| norm.check(me, self.part, out.len(), hidden))?;
        self.unit.part(0)?;
        self.unit.reduce_scatter(0, split, None, &mut [])?;
        self.run(|mover, _| mover.reduce_scatter(call, norm, out))
    }

    fn allgather(
        &mut self,
        own: OwnRowsIn<'_, T, Gpu>,
        split: RowSplit<'_>,
        out: AllRowsIn<'_, T, Gpu>,
    ) -> Result<(), UnitError> {
        let OwnRowsIn { rows, hidden, labels, width, bound } = own;
        let call = self.split_call(hidden, split)?;
        self.check("the rows", rows.len(), split.positions(self.unit.rank()).len() * hidden)?;
        self.check("all rows", out.rows.len(), split.tokens() * hidden)?;
        self.region(Region::Rows, out.rows.len())?;
        let own = OwnRows { rows: &[], hidden: 0, labels, width, bound };
        self.unit.allgather(own, split, AllRows { rows: &mut [], labels: out.labels })?;
        self.run(|mover, _| mover.allgather(call, rows, out.rows))
    }

    fn dispatch(&mut self, x: DeviceRows<'_, T>, hidden: usize, plan: &DispatchPlan) -> Result<(), UnitError> {
        self.check_stopped()?;
        self.check("the rows", x.len(), plan.tokens() * hidden)?;
        self.unit.dispatch(&[], 0, plan)?;
        let rows = self.unit.received().rows;
        let received = (0..plan.ranks()).map(|rank| rows.of_source(rank).len() as u32);
        self.sent.set(plan, hidden, received);
        let arrived = rows.len() * hidden;
        drop(rows);
        self.region(Region::Rows, arrived)?;
        self.run(|mover, sent| mover.dispatch(sent.rows::<T>(), x))
    }

    fn received(&mut self) -> ReceivedIn<'_, T, Gpu> {
        let Self { unit, mover, sent, .. } = self;
        let Received { rows: index, pair_rows, experts, weights, .. } = unit.received();
        let bytes = (index.len() * sent.hidden * size_of::<T>()) as u64;
        // The rows fit, otherwise `dispatch` would have failed.
        let [rows, sums] = [Region::Rows, Region::Sums].map(|region| {
            let buffer = mover.region(region);
            DeviceRows::of(crate::Buffer { bytes: bytes.min(buffer.bytes), ..buffer })
        });
        ReceivedIn { rows: DeviceReceived { rows, index }, pair_rows, experts, weights, sums }
    }

    fn combine(&mut self, plan: &DispatchPlan, out: DeviceRows<'_, T>) -> Result<(), UnitError> {
        self.check_stopped()?;
        self.check("out", out.len(), plan.tokens() * self.sent.hidden)?;
        self.unit.combine(plan, &mut [])?;
        self.run(|mover, sent| mover.combine(sent.rows::<T>(), out))
    }
}

lockstep_through!([L: Lockstep, M: Send, T: Element] DeviceCollectives<L, M, T>, end => end.unit);
