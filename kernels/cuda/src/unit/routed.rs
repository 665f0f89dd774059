//! Dispatch and combine without the host: the GPU plans them from the router's choices in its own memory. Beforehand,
//! all ranks must have agreed to dispatch, and on the capacity.

use semmoe_kernels::Element;
use semmoe_kernels::collectives::{Collectives, Lockstep, UnitError};

use super::DeviceCollectives;
use super::mover::{MoveError, Region, RowMover};
use super::space::{DeviceRows, Gpu};
use crate::calls::Rows;
use crate::team::Buffer;

/// This rank's n tokens and the router's choices for them, in its GPU's memory.
#[derive(Clone, Copy, Debug)]
pub struct RoutedTokens {
    /// n, H
    pub rows: Rows,
    /// k
    pub top_k: u64,
    /// N
    pub num_experts: u64,
    /// `[n, k]` i32
    pub experts: Buffer,
    /// `[n, k]` f32
    pub weights: Buffer,
    /// `[N]` u32: the rank to which this rank sends its tokens for each expert; `None` if every rank has a part of
    /// each.
    pub rank_of_expert: Option<Buffer>,
    /// Maximum number of rows that any rank receives, equal on all ranks.
    pub capacity: u64,
}

/// The rows that a rank has received once its stream has passed the dispatch: R, at most [`RoutedTokens::capacity`].
#[derive(Clone, Copy, Debug)]
pub struct ArrivedRows {
    /// `[R, H]`
    pub rows: Buffer,
    /// `[R, H]`: to be filled before the combine.
    pub sums: Buffer,
    /// `[R, k]` i32: the experts of each row on this rank, followed by -1.
    pub experts: Buffer,
    /// `[R, k]` f32
    pub weights: Buffer,
    /// u32: R
    pub count: Buffer,
}

/// A [`RowMover`] whose dispatch the GPU can plan.
pub trait RoutedMover<T: Element>: RowMover<T> {
    /// Plans the dispatch of `x` and copies its rows and routes to their ranks.
    ///
    /// # Errors
    /// See [`MoveError`].
    fn dispatch_routed(&mut self, call: &RoutedTokens, x: DeviceRows<'_, T>) -> Result<ArrivedRows, MoveError>;

    /// Reduces [`Region::Sums`] over the ranks that received rows in the last dispatch.
    ///
    /// # Errors
    /// See [`MoveError`].
    fn combine_routed(&mut self, call: &RoutedTokens, out: DeviceRows<'_, T>) -> Result<(), MoveError>;
}

/// Collectives whose dispatch the GPU can plan.
pub trait RoutedCollectives<T: Element>: Collectives<T, Gpu> {
    /// Sends each row of `x` `[n, H]` once to every rank that hosts one of its experts. Returns before the GPU has done
    /// so.
    ///
    /// # Errors
    /// A kernel of an earlier call stopped, or memory is too small for `capacity` rows.
    fn dispatch_routed(&mut self, call: &RoutedTokens, x: DeviceRows<'_, T>) -> Result<ArrivedRows, UnitError>;

    /// Returns the sums of the last dispatch's rows to their tokens, added in rank order: `out` is `[n, H]`.
    ///
    /// # Errors
    /// A kernel of an earlier call stopped.
    fn combine_routed(&mut self, call: &RoutedTokens, out: DeviceRows<'_, T>) -> Result<(), UnitError>;
}

impl<L: Lockstep, M: RoutedMover<T>, T: Element> RoutedCollectives<T> for DeviceCollectives<L, M, T> {
    fn dispatch_routed(&mut self, call: &RoutedTokens, x: DeviceRows<'_, T>) -> Result<ArrivedRows, UnitError> {
        self.check_stopped()?;
        let RoutedTokens { rows, capacity, .. } = *call;
        self.check("the rows", x.len(), (rows.tokens * rows.hidden) as usize)?;
        for region in [Region::Rows, Region::Sums] {
            self.region(region, (capacity * rows.hidden) as usize)?;
        }
        self.run(|mover, _| mover.dispatch_routed(call, x))
    }

    fn combine_routed(&mut self, call: &RoutedTokens, out: DeviceRows<'_, T>) -> Result<(), UnitError> {
        self.check_stopped()?;
        self.check("out", out.len(), (call.rows.tokens * call.rows.hidden) as usize)?;
        self.run(|mover, _| mover.combine_routed(call, out))
    }
}
