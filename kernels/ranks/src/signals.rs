//! One rank's signal words, visible to all ranks.

use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::MAX_WORLD;
use crate::bell::Bell;
use crate::call::CALL_WORDS;

/// Size of one rank's signals, which are initially zero.
pub const SIGNAL_BYTES: usize = 512;

/// One rank's signals, written only by that rank, except the bell's waiters. If all words are zero, the rank has not
/// arrived yet.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Signals {
    /// Rung on each change of `arrived` and `state`; waiting threads sleep on it.
    pub(crate) bell: Bell,
    /// The last epoch that this rank has reached.
    pub(crate) arrived: AtomicU32,
    /// [`ALIVE`], [`LEFT`] or [`GAVE_UP`]
    pub(crate) state: AtomicU32,
    /// If the rank gave up, the rank that it was waiting for.
    pub(crate) cause: AtomicU32,
    /// Nonzero if the rank has joined.
    pub(crate) joined: AtomicU32,
    /// The rank's current call; see [`crate::call`].
    pub(crate) call: [AtomicU64; CALL_WORDS],
    /// Number of rows that the rank sends to each rank in the current dispatch.
    pub(crate) counts: [AtomicU32; MAX_WORLD],
}

const _: () = assert!(size_of::<Signals>() <= SIGNAL_BYTES);

pub(crate) const ALIVE: u32 = 0;
pub(crate) const LEFT: u32 = 1;
pub(crate) const GAVE_UP: u32 = 2;
