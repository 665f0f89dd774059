//! The words of one rank that all ranks see.

use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::MAX_WORLD;
use crate::bell::Bell;
use crate::call::CALL_WORDS;

/// Bytes of one rank's signals; they begin as zeros.
pub const SIGNAL_BYTES: usize = 512;

/// The signals of one rank, written by it alone but for the bell's waiters. All zeros is a rank that has not arrived
/// yet.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Signals {
    /// Rung at each change of `arrived` and `state`; waiters sleep on it.
    pub(crate) bell: Bell,
    /// The last epoch that the rank has reached.
    pub(crate) arrived: AtomicU32,
    /// [`ALIVE`], [`LEFT`] or [`GAVE_UP`]
    pub(crate) state: AtomicU32,
    /// If it gave up: the rank that it waited for.
    pub(crate) cause: AtomicU32,
    /// Not 0 if the rank has joined.
    pub(crate) joined: AtomicU32,
    /// The call that the rank is in; see [`crate::call`].
    pub(crate) call: [AtomicU64; CALL_WORDS],
    /// Rows that it sends to each rank in this dispatch.
    pub(crate) counts: [AtomicU32; MAX_WORLD],
}

const _: () = assert!(size_of::<Signals>() <= SIGNAL_BYTES);

pub(crate) const ALIVE: u32 = 0;
pub(crate) const LEFT: u32 = 1;
pub(crate) const GAVE_UP: u32 = 2;
