//! The collectives as one rank of a unit calls them, for any transport.
//!
//! | role | interface | implementations |
//! |---|---|---|
//! | the collectives | [`Collectives`] | [`RowCollectives`], over messages and row memory; [`CastCollectives`], over collectives of another type; [`HybridCollectives`], for experts sliced over a node, or attention in groups of ranks |
//! | messages and barriers | [`Lockstep`] | threads (`semmoe-ranks`), streams over shared rings or TCP (the worker) |
//! | groups of ranks | [`UnitLink`]: the ranks inside a node, and across nodes | [`GroupLink`], over the unit's own link |
//! | rows that peers read in place | [`RowMemory`] | [`PrivateMemory`] (peers read nothing), shared memory (`semmoe-ranks`) |
//! | memory that contains a caller's rows | [`Space`] | [`Host`], GPU memory (`semmoe-kernels-cuda`) |
//!
//! `tests/reference` defines each collective bit for bit. A collective is one exchange of messages, which also acts as
//! its barrier. If a peer's memory is within reach, its messages carry no rows: rows are read in place, to be added or
//! gathered. A unit may therefore use shared memory within a host and messages between hosts.

mod cast;
mod group;
mod hybrid;
mod lockstep;
mod memory;
mod rows;
mod space;
mod wire;

use crate::dispatch::DispatchPlan;
use crate::element::Element;
use crate::split::RowSplit;

pub use cast::CastCollectives;
pub use group::{GroupLink, LevelBytes, UnitLink};
pub use hybrid::{HybridCollectives, MAX_CHUNKS, Stage, StageName, StageObserver, Unobserved};
pub use lockstep::{Exchange, Lockstep, MAX_MESSAGE_BYTES, UnitError, Wake, Waker};
pub use memory::{Half, PeerRows, PrivateMemory, RowMemory, SharedRows};
pub use rows::{DISPATCH_HEADER_BYTES, RowCollectives, dispatch_row_bytes, split_bytes};
pub use space::{Host, Space};

/// One rank's end of a unit, for rows of `T` in the memory of `S`. All ranks call the same collectives in the same
/// order, including ranks without tokens. Labels, splits and plans are in host memory in every space.
pub trait Collectives<T: Element, S: Space = Host>: Lockstep {
    /// Returns the buffer for this rank's `[n, H]` partial sums, to be written before [`Collectives::reduce_scatter`].
    /// Its initial contents are unspecified.
    ///
    /// # Errors
    /// If the elements do not fit in this rank's memory.
    fn part(&mut self, len: usize) -> Result<S::Write<'_, T>, UnitError>;

    /// Computes `out[i] = sum over ranks q, in rank order, of part_q[token(i)]` for this rank's positions i, from each
    /// rank's last [`Collectives::part`]. `out` is `[m, H]`. Every rank passes the same split. With a norm, `out`
    /// receives the normed rows, as defined by `reduce_scatter_norm` in `tests/reference`.
    ///
    /// # Errors
    /// If a rank failed or has a different split.
    fn reduce_scatter(
        &mut self,
        hidden: usize,
        split: RowSplit<'_>,
        norm: Option<NormIn<'_, T, S>>,
        out: S::Write<'_, T>,
    ) -> Result<(), UnitError>;

    /// Distributes the rows and labels of all ranks to all ranks, each to its token's position: the inverse of
    /// [`Collectives::reduce_scatter`].
    ///
    /// # Errors
    /// If a rank failed, or has a different split or an out-of-range label.
    fn allgather(
        &mut self,
        own: OwnRowsIn<'_, T, S>,
        split: RowSplit<'_>,
        out: AllRowsIn<'_, T, S>,
    ) -> Result<(), UnitError>;

    /// Sends each token's row and pairs to the ranks named by the plan. `x` is `[n, H]`.
    ///
    /// # Errors
    /// If a rank failed or sent an invalid message, or the rows do not fit in this rank's memory.
    fn dispatch(&mut self, x: S::Read<'_, T>, hidden: usize, plan: &DispatchPlan) -> Result<(), UnitError>;

    /// Returns the rows received in the last dispatch, and the buffer for this rank's sum for each of them.
    fn received(&mut self) -> ReceivedIn<'_, T, S>;

    /// Returns the sums of [`Collectives::received`] to their sources: `out[t]` is the sum over the ranks to which the
    /// plan sent token t, in rank order; zeros for a token that was not sent. `plan` is that of the last dispatch;
    /// `out` is `[n, H]`.
    ///
    /// # Errors
    /// If a rank failed or sent an invalid message.
    fn combine(&mut self, plan: &DispatchPlan, out: S::Write<'_, T>) -> Result<(), UnitError>;
}

/// [`NormIn`] with rows in host memory.
pub type Norm<'a, T> = NormIn<'a, T, Host>;
/// [`OwnRowsIn`] with rows in host memory.
pub type OwnRows<'a, T> = OwnRowsIn<'a, T, Host>;
/// [`AllRowsIn`] with rows in host memory.
pub type AllRows<'a, T> = AllRowsIn<'a, T, Host>;
/// [`ReceivedIn`] with rows in host memory.
pub type Received<'a, T> = ReceivedIn<'a, T, Host>;

/// Residual and RMSNorm of the fused reduce-scatter.
#[derive(Debug)]
pub struct NormIn<'a, T: Element, S: Space> {
    /// `[n, H]`, in token order, equal on every rank.
    pub residual: S::Read<'a, T>,
    /// `[H]`
    pub weight: S::Read<'a, T>,
    /// Added to the mean of squares.
    pub epsilon: f32,
    /// `[m, H]`: receives the residual for the next layer.
    pub residual_out: S::Write<'a, T>,
}

impl<T: Element, S: Space> NormIn<'_, T, S> {
    /// Checks the lengths against a part of `part` elements, of which `own` belong to this rank.
    ///
    /// # Errors
    /// If a length does not match.
    pub fn check(&self, rank: usize, part: usize, own: usize, hidden: usize) -> Result<(), UnitError> {
        UnitError::check(rank, "the residual", S::elements(&self.residual), part)?;
        UnitError::check(rank, "the residual out", S::elements_mut(&self.residual_out), own)?;
        UnitError::check(rank, "the norm's weight", S::elements(&self.weight), hidden)
    }
}

/// One rank's rows and labels.
#[derive(Clone, Copy, Debug)]
pub struct OwnRowsIn<'a, T: Element, S: Space> {
    /// `[m, H]`
    pub rows: S::Read<'a, T>,
    /// H
    pub hidden: usize,
    /// `[m, w]`
    pub labels: &'a [u16],
    /// w
    pub width: usize,
    /// The exclusive upper bound of labels.
    pub bound: usize,
}

/// Rows and labels of all ranks, in token order.
#[derive(Debug)]
pub struct AllRowsIn<'a, T: Element, S: Space> {
    /// `[n, H]`
    pub rows: S::Write<'a, T>,
    /// `[n, w]`
    pub labels: &'a mut [u16],
}

/// The rows that a rank received in a dispatch: R rows by source rank, in the source's token order, with their pairs.
#[derive(Debug)]
pub struct ReceivedIn<'a, T: Element, S: Space> {
    /// The rows.
    pub rows: S::Received<'a, T>,
    /// `[pairs]`: the row of each pair, ascending.
    pub pair_rows: &'a [u32],
    /// `[pairs]`: logical expert ids, as sent by the sources.
    pub experts: &'a [u16],
    /// `[pairs]`: router weights.
    pub weights: &'a [f32],
    /// `[R, H]`: receives the sums of weight x expert(row); the initial contents are unspecified.
    pub sums: S::Write<'a, T>,
}

/// Received rows, in place.
#[derive(Debug)]
pub struct ReceivedRows<'a, T> {
    pub(self) hidden: usize,
    /// `[P + 1]`: the first row of each source.
    pub(self) offsets: &'a [u32],
    /// `[R]`: the index of each row among its source's rows.
    pub(self) places: &'a [u32],
    /// `[R]`
    pub(self) sources: &'a [u16],
    pub(self) bases: smallvec::SmallVec<[&'a [T]; rows::INLINE_RANKS]>,
}

impl<'a, T> ReceivedRows<'a, T> {
    /// R
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether no rank sent any rows.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Returns the rows of one source.
    pub fn of_source(&self, rank: usize) -> std::ops::Range<usize> {
        self.offsets[rank] as usize..self.offsets[rank + 1] as usize
    }

    /// Returns the rank that sent a row. Panics if out of range.
    pub fn source(&self, row: usize) -> usize {
        self.sources[row].into()
    }

    /// Returns one row, `[H]`. Panics if out of range.
    pub fn row(&self, row: usize) -> &'a [T] {
        let base = self.bases[usize::from(self.sources[row])];
        &base[self.places[row] as usize * self.hidden..][..self.hidden]
    }
}
