//! Where a caller's rows are.

use std::fmt::Debug;

use super::ReceivedRows;
use crate::element::Element;

/// Memory that a caller's rows lie in, that of the host or of a GPU: the types that
/// [`Collectives`](super::Collectives) take and return.
pub trait Space: 'static {
    /// Rows that are read.
    type Read<'a, T: Element>: Copy + Debug;
    /// Rows that are written.
    type Write<'a, T: Element>: Debug;
    /// Rows of a dispatch.
    type Received<'a, T: Element>: Debug;

    /// Elements of rows that are read.
    fn elements<T: Element>(rows: &Self::Read<'_, T>) -> usize;

    /// Elements of rows that are written.
    fn elements_mut<T: Element>(rows: &Self::Write<'_, T>) -> usize;
}

/// Slices.
#[derive(Clone, Copy, Debug)]
pub enum Host {}

impl Space for Host {
    type Read<'a, T: Element> = &'a [T];
    type Write<'a, T: Element> = &'a mut [T];
    type Received<'a, T: Element> = ReceivedRows<'a, T>;

    fn elements<T: Element>(rows: &&[T]) -> usize {
        rows.len()
    }

    fn elements_mut<T: Element>(rows: &&mut [T]) -> usize {
        rows.len()
    }
}
