//! One rank's end of a group.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::AcqRel;
use std::time::Duration;

use semmoe_kernels::SeenTokens;
use semmoe_tables::RankId;

use crate::barrier::{Barrier, leave};
use crate::call::{Call, Operation};
use crate::error::RankError;
use crate::signals::{SIGNAL_BYTES, Signals};
use crate::span::{ALIGNMENT, Span};
use crate::{MAX_NORM_WIDTH, MAX_WORLD};

/// A group's memory, as mapped in this process.
#[derive(Clone, Copy, Debug)]
pub struct RawGroup<'a> {
    /// This rank.
    pub rank: usize,
    /// `[P]`: each rank's symmetric buffer, at a multiple of [`ALIGNMENT`].
    pub buffers: &'a [*mut u8],
    /// Bytes of each buffer.
    pub buffer_bytes: usize,
    /// `[P]`: each rank's [`SIGNAL_BYTES`] bytes of signals, at a multiple of 64, zeroed before the first rank joins.
    pub signals: &'a [*mut u8],
    /// Maximum time for which a collective waits for a rank.
    pub timeout: Duration,
}

/// One rank's end of a group. Every rank makes the same calls in the same order. When a communicator is dropped, peers
/// that wait for it fail at once.
#[derive(Debug)]
pub struct Communicator {
    pub(crate) rank: usize,
    buffers: Vec<NonNull<u8>>,
    buffer_bytes: usize,
    signals: Vec<NonNull<Signals>>,
    barrier: Barrier,
    spent: Option<RankError>,
    /// Scratch for the fused norm, reserved at full size; pages are allocated on first use.
    pub(crate) wide_row: Vec<f32>,
    pub(crate) seen: SeenTokens,
    /// The owner of the memory.
    _memory: Option<Box<dyn Any + Send>>,
}

// SAFETY: any thread may use the memory that the pointers refer to; `Communicator` gives access to its own buffer only
// through `&self` and `&mut self`.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Joins a group whose memory the caller owns.
    ///
    /// # Safety
    /// Buffers and signals must be mapped with the stated sizes, must not overlap, and must stay mapped until the last
    /// communicator of the group is dropped or its process has ended. Between two collectives, only its own rank may
    /// access a buffer; only communicators may access signals. All ranks must see the same memory, in the same order.
    ///
    /// # Errors
    /// If the world, the rank or an alignment is invalid, or the rank has already joined.
    pub unsafe fn join(group: RawGroup<'_>) -> Result<Self, RankError> {
        // SAFETY: upheld by the caller.
        unsafe { Self::with_memory(group, None) }
    }

    /// Joins a group like [`Communicator::join`], and keeps the group's memory alive.
    ///
    /// # Safety
    /// See [`Communicator::join`]; the group's memory must be valid for as long as `memory` lives.
    pub(crate) unsafe fn with_memory(
        group: RawGroup<'_>,
        memory: Option<Box<dyn Any + Send>>,
    ) -> Result<Self, RankError> {
        let world = group.buffers.len();
        check_world(world)?;
        if group.signals.len() != world {
            return Err(RankError::World { found: group.signals.len(), limit: world });
        }
        if group.rank >= world {
            return Err(RankError::NoSuchRank { rank: group.rank, world });
        }
        RankError::check_limit("bytes of a symmetric buffer", group.buffer_bytes, isize::MAX as usize)?;
        let buffers =
            group.buffers.iter().map(|&at| aligned(at, "a symmetric buffer", ALIGNMENT)).collect::<Result<_, _>>()?;
        let signals: Vec<NonNull<Signals>> = group
            .signals
            .iter()
            .map(|&at| aligned(at, "signals", align_of::<Signals>()).map(NonNull::cast))
            .collect::<Result<_, _>>()?;
        // SAFETY: upheld by the caller; all zeros, and any values that communicators write, are valid signals.
        let own = unsafe { signals[group.rank].as_ref() };
        if own.joined.swap(1, AcqRel) != 0 {
            return Err(RankError::Joined { rank: RankId::new(group.rank as u16) });
        }
        Ok(Self {
            rank: group.rank,
            buffers,
            buffer_bytes: group.buffer_bytes,
            signals,
            barrier: Barrier::new(group.rank, world, group.timeout),
            spent: None,
            wide_row: Vec::with_capacity(MAX_NORM_WIDTH),
            seen: SeenTokens::default(),
            _memory: memory,
        })
    }

    /// Reserves scratch for splits of up to `tokens` tokens, so that [`Communicator::check_split`] does not allocate.
    pub fn reserve(&mut self, tokens: usize) {
        self.seen = SeenTokens::with_capacity(tokens);
    }

    /// Checks a given shuffled order, using this communicator's scratch; see [`semmoe_kernels::RowSplit::shuffled`].
    ///
    /// # Errors
    /// If the order is invalid.
    pub fn check_split<'a>(
        &mut self,
        permutation: &'a [u32],
        offsets: &'a [u32],
    ) -> Result<semmoe_kernels::RowSplit<'a>, RankError> {
        Ok(semmoe_kernels::RowSplit::shuffled(permutation, offsets, &mut self.seen)?)
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> RankId {
        RankId::new(self.rank as u16)
    }

    /// P
    #[must_use]
    pub fn world(&self) -> usize {
        self.buffers.len()
    }

    /// Returns the size of each rank's symmetric buffer.
    #[must_use]
    pub fn buffer_bytes(&self) -> usize {
        self.buffer_bytes
    }

    /// Returns a span of this rank's own buffer.
    ///
    /// # Errors
    /// If the span exceeds the buffer, or an earlier call failed for good: a late rank may then still use the buffer.
    pub fn view<T: bytemuck::Pod>(&self, span: Span<T>) -> Result<&[T], RankError> {
        self.check_alive()?;
        self.check_span("a span", span)?;
        // SAFETY: the span is in bounds and aligned (checked), any bytes are a valid `T`, and between collectives only
        // this communicator accesses its buffer.
        Ok(unsafe { std::slice::from_raw_parts(self.at(self.rank, span), span.len()) })
    }

    /// Returns a mutable span of this rank's own buffer.
    ///
    /// # Errors
    /// See [`Communicator::view`].
    pub fn view_mut<T: bytemuck::Pod>(&mut self, span: Span<T>) -> Result<&mut [T], RankError> {
        self.check_alive()?;
        self.check_span("a span", span)?;
        // SAFETY: as in `view`; in addition, `&mut self` makes the access exclusive.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.at(self.rank, span), span.len()) })
    }

    /// Waits until every rank has arrived.
    ///
    /// # Errors
    /// If a rank left, is late or makes a different call.
    pub fn barrier(&mut self) -> Result<(), RankError> {
        self.enter(&Call::new(Operation::Barrier, semmoe_kernels::Dtype::F32))?;
        self.exit()
    }

    /// Begins a collective: returns once all ranks have arrived and agree. Until [`Communicator::exit`], ranks access
    /// buffers only as the collective specifies.
    pub(crate) fn enter(&mut self, call: &Call) -> Result<(), RankError> {
        self.check_alive()?;
        call.publish(self.own(), self.buffer_bytes);
        self.pass()?;
        let compared = call.compare(self.rank, &self.all_signals()[..self.world()], self.buffer_bytes);
        if compared.is_err() {
            // No rank may change its call while another is still comparing.
            self.exit()?;
        }
        compared
    }

    /// Ends a collective: returns once all ranks have finished.
    pub(crate) fn exit(&mut self) -> Result<(), RankError> {
        self.pass()
    }

    fn pass(&mut self) -> Result<(), RankError> {
        let (all, world) = (self.all_signals(), self.world());
        let passed = self.barrier.pass(&all[..world]);
        if let Err(error) = &passed {
            self.spent = Some(error.clone());
        }
        passed
    }

    /// Returns the signals of all ranks in order; entries past the last rank are this rank's own.
    fn all_signals<'s>(&self) -> [&'s Signals; MAX_WORLD] {
        std::array::from_fn(|rank| self.signals(if rank < self.world() { rank } else { self.rank }))
    }

    /// Returns the signals of a rank.
    pub(crate) fn signals<'s>(&self, rank: usize) -> &'s Signals {
        // SAFETY: signals stay mapped while a communicator lives, contain only atomics, and are valid if all zeros;
        // callers do not keep the reference beyond the collective.
        unsafe { self.signals[rank].as_ref() }
    }

    fn own<'s>(&self) -> &'s Signals {
        self.signals(self.rank)
    }

    /// Returns the start of a rank's span, which must have been checked.
    pub(crate) fn at<T: bytemuck::Pod>(&self, rank: usize, span: Span<T>) -> *mut T {
        // SAFETY: the span ends within the buffer, so its start is within the buffer or at the buffer's end.
        unsafe { self.buffers[rank].as_ptr().add(span.offset()).cast() }
    }

    pub(crate) fn check_alive(&self) -> Result<(), RankError> {
        self.spent.clone().map_or(Ok(()), Err)
    }

    pub(crate) fn check_span<T: bytemuck::Pod>(&self, what: &'static str, span: Span<T>) -> Result<(), RankError> {
        RankError::check_limit(what, span.end(), self.buffer_bytes)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        leave(self.own());
    }
}

pub(crate) fn check_world(found: usize) -> Result<(), RankError> {
    if (1..=MAX_WORLD).contains(&found) { Ok(()) } else { Err(RankError::World { found, limit: MAX_WORLD }) }
}

fn aligned(at: *mut u8, what: &'static str, alignment: usize) -> Result<NonNull<u8>, RankError> {
    match NonNull::new(at) {
        Some(found) if at.addr().is_multiple_of(alignment) => Ok(found),
        Some(_) => Err(RankError::Misaligned { what, found: at.addr(), alignment }),
        None => Err(RankError::memory(format_args!("{what} is null"))),
    }
}

const _: () = assert!(SIGNAL_BYTES.is_multiple_of(align_of::<Signals>()));
