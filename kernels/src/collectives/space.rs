//! Memory kinds for a caller's rows.

use std::fmt::Debug;

use super::ReceivedRows;
use crate::element::Element;

/// The kind of memory that contains a caller's rows, host or GPU. It determines the types that
/// [`Collectives`](super::Collectives) take and return.
pub trait Space: 'static {
    /// Rows for reading.
    type Read<'a, T: Element>: Copy + Debug;
    /// Rows for writing.
    type Write<'a, T: Element>: Debug;
    /// Rows received in a dispatch.
    type Received<'a, T: Element>: Debug;

    /// Returns the number of elements in rows for reading.
    fn elements<T: Element>(rows: &Self::Read<'_, T>) -> usize;

    /// Returns the number of elements in rows for writing.
    fn elements_mut<T: Element>(rows: &Self::Write<'_, T>) -> usize;
}

/// Host memory: slices.
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
