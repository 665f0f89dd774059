//! Ranks on several hosts, over NCCL: where no peer's memory can be mapped, rows are put in order by a kernel in local memory, and NCCL
//! moves each rank's segment.
//!
//! - Reduce-scatter and allgather: the shuffle, then one `ncclReduce` or `ncclBroadcast` per rank in a group, as parts are uneven. NCCL
//!   adds in an order of its own: sums are equal up to rounding only.
//! - Dispatch and combine: `dispatch_plan` and `pack`, then one send and one receive per peer and array in a group; the way back in the
//!   other direction, and `unpack` adds in rank order. Both equal the reference bit for bit.
//!
//! NCCL is told counts by the host: offsets, and how many rows go to and come from each rank. [`Hosts::plan`] lets the ranks tell one
//! another; the caller copies the counts to the host. All that the host can see is checked before the first launch.

mod error;
mod exchange;

use std::ffi::c_void;

use semmoe_kernels::Dtype;

pub use error::HostsError;
pub use exchange::{Counts, Routed, Segments};

use crate::calls::{Rows, Shuffle};
use crate::launch::{Grid, Launch};
use crate::team::{Buffer, Team};

/// What one send or receive counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Rows.
    Element(Dtype),
    /// Counts, ids and positions.
    Int32,
    /// Weights.
    Float32,
}

impl Kind {
    /// Bytes of one.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::Element(dtype) => dtype.bytes() as u64,
            Self::Int32 | Self::Float32 => 4,
        }
    }
}

/// A run of elements in device memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// Where it begins.
    pub address: u64,
    /// Elements.
    pub count: u64,
    /// What they are.
    pub kind: Kind,
}

/// One rank's end of NCCL. Errors are its own words.
pub trait Wire {
    /// This rank.
    fn rank(&self) -> usize;
    /// P
    fn ranks(&self) -> usize;
    /// Begins a group of calls that are made together.
    ///
    /// # Errors
    /// NCCL's.
    fn group_start(&mut self) -> Result<(), String>;
    /// Ends it.
    ///
    /// # Errors
    /// NCCL's.
    fn group_end(&mut self) -> Result<(), String>;
    /// `ncclSend`
    ///
    /// # Errors
    /// NCCL's.
    ///
    /// # Safety
    /// Memory of this rank's GPU until the stream has come past the call.
    unsafe fn send(&mut self, from: Span, peer: usize, stream: *mut c_void) -> Result<(), String>;
    /// `ncclRecv`
    ///
    /// # Errors
    /// NCCL's.
    ///
    /// # Safety
    /// Memory of this rank's GPU until the stream has come past the call.
    unsafe fn receive(&mut self, to: Span, peer: usize, stream: *mut c_void) -> Result<(), String>;
    /// `ncclReduce` by sums; `to` counts on the root only.
    ///
    /// # Errors
    /// NCCL's.
    ///
    /// # Safety
    /// Memory of this rank's GPU until the stream has come past the call.
    unsafe fn reduce(&mut self, from: Span, to: u64, root: usize, stream: *mut c_void) -> Result<(), String>;
    /// `ncclBroadcast`; `from` counts on the root only.
    ///
    /// # Errors
    /// NCCL's.
    ///
    /// # Safety
    /// Memory of this rank's GPU until the stream has come past the call.
    unsafe fn broadcast(&mut self, from: u64, to: Span, root: usize, stream: *mut c_void) -> Result<(), String>;
}

/// What runs launches on this rank's GPU. Errors are its own words.
pub trait Runner {
    /// Launches on a stream.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// The memory of the launch is this GPU's until the stream has come past it.
    unsafe fn launch(&self, launch: &Launch, stream: *mut c_void) -> Result<(), String>;
    /// Blocks that fill the GPU.
    fn blocks(&self) -> u32;
}

/// One rank of a group on several hosts. Memory is this rank's own; addresses are device pointers.
pub struct Hosts<'a, W, R> {
    /// The way to the other ranks.
    pub wire: &'a mut W,
    /// The GPU.
    pub runner: &'a R,
    /// This rank alone: its own signals, which hold the plan's counts, and its report word.
    pub team: &'a Team,
    /// A CUstream of the GPU.
    pub stream: *mut c_void,
}

/// One rank's side of a reduce-scatter or an allgather.
#[derive(Clone, Copy, Debug)]
pub struct Shuffled<'a> {
    /// Of the n tokens of all ranks.
    pub rows: Rows,
    /// `[n]` on the device; `None`: the tokens' own order.
    pub permutation: Option<Buffer>,
    /// `[P + 1]`, ascending from 0 to n.
    pub offsets: &'a [u32],
    /// `[n, H]` on the device: rows in the order of their ranks; not needed without a permutation.
    pub scratch: Buffer,
}

/// Bytes that a buffer must have.
fn room(what: &'static str, buffer: Buffer, expected: u64) -> Result<(), HostsError> {
    match buffer.bytes {
        found if found < expected => Err(HostsError::Short { what, found, expected }),
        _ => Ok(()),
    }
}

impl<W: Wire, R: Runner> Hosts<'_, W, R> {
    /// `out[i] = sum over r of part_r[permutation[offsets[rank] + i]]`; `part` is `[n, H]`, `out` `[m, H]`.
    ///
    /// # Errors
    /// Offsets or buffers that do not fit, before any launch; a driver or an NCCL that refuses.
    ///
    /// # Safety
    /// Buffers are memory of this rank's GPU until the stream has come past the call.
    pub unsafe fn reduce_scatter(&mut self, call: &Shuffled<'_>, part: Buffer, out: Buffer) -> Result<(), HostsError> {
        let ordered = self.check(call, "out", out)?;
        room("part", part, ordered)?;
        let shuffle = self.shuffle(call, [part, call.scratch], false)?;
        let from = if shuffle.is_some() { call.scratch } else { part };
        // SAFETY: the caller's promise.
        unsafe { self.run(shuffle.as_ref())? };
        let stream = self.stream;
        self.each_part(call, |wire, at, root| {
            let from = Span { address: from.address + at.address, ..at };
            // SAFETY: the part lies within `from`, and this rank's fits `out`, both checked; the memory is the caller's promise.
            unsafe { wire.reduce(from, out.address, root, stream) }
        })
    }

    /// `out[permutation[offsets[r] + i]] = rows_r[i]` for every rank r; `rows` is `[m, H]`, `out` `[n, H]`.
    ///
    /// # Errors
    /// Offsets or buffers that do not fit, before any launch; a driver or an NCCL that refuses.
    ///
    /// # Safety
    /// Buffers are memory of this rank's GPU until the stream has come past the call.
    pub unsafe fn allgather(&mut self, call: &Shuffled<'_>, rows: Buffer, out: Buffer) -> Result<(), HostsError> {
        let ordered = self.check(call, "rows", rows)?;
        room("out", out, ordered)?;
        let shuffle = self.shuffle(call, [call.scratch, out], true)?;
        let to = if shuffle.is_some() { call.scratch } else { out };
        let stream = self.stream;
        self.each_part(call, |wire, at, root| {
            let to = Span { address: to.address + at.address, ..at };
            // SAFETY: the part lies within `to`, and this rank's within `rows`, both checked; the memory is the caller's promise.
            unsafe { wire.broadcast(rows.address, to, root, stream) }
        })?;
        // SAFETY: the caller's promise.
        unsafe { self.run(shuffle.as_ref()) }
    }

    /// Offsets ascend from 0 to n, and this rank's rows fit `own`; bytes of all rows.
    fn check(&self, call: &Shuffled<'_>, what: &'static str, own: Buffer) -> Result<u64, HostsError> {
        let (offsets, ranks, rank) = (call.offsets, self.wire.ranks(), self.wire.rank());
        let ascending = offsets.len() == ranks + 1 && offsets.is_sorted() && offsets[0] == 0;
        if !ascending || u64::from(offsets[ranks]) != call.rows.tokens {
            return Err(HostsError::Offsets { ranks, tokens: call.rows.tokens });
        }
        room(what, own, call.rows.bytes_of(u64::from(offsets[rank + 1] - offsets[rank])))?;
        Ok(call.rows.bytes_of(call.rows.tokens))
    }

    fn shuffle(&self, call: &Shuffled<'_>, [from, to]: [Buffer; 2], back: bool) -> Result<Option<Launch>, HostsError> {
        let Some(permutation) = call.permutation else { return Ok(None) };
        let shuffle = Shuffle { from: &[from], to: &[to], permutation: &[permutation], rows: call.rows, back };
        Ok(Some(shuffle.launch(self.team, self.grid())?))
    }

    fn grid(&self) -> Grid {
        Grid::of_blocks(self.runner.blocks().clamp(1, crate::MAX_BLOCKS))
    }

    /// # Safety
    /// As for [`Runner::launch`].
    unsafe fn run(&self, launch: Option<&Launch>) -> Result<(), HostsError> {
        let Some(launch) = launch else { return Ok(()) };
        // SAFETY: the caller's promise.
        unsafe { self.runner.launch(launch, self.stream) }.map_err(HostsError::Device)
    }

    /// One NCCL call for each rank's part, in one group; the span's address is the offset of the part.
    fn each_part(
        &mut self,
        call: &Shuffled<'_>,
        mut one: impl FnMut(&mut W, Span, usize) -> Result<(), String>,
    ) -> Result<(), HostsError> {
        self.group(|wire| {
            for (root, ends) in call.offsets.windows(2).enumerate() {
                let count = u64::from(ends[1] - ends[0]) * call.rows.hidden;
                let address = call.rows.bytes_of(ends[0].into());
                one(wire, Span { address, count, kind: Kind::Element(call.rows.dtype) }, root)?;
            }
            Ok(())
        })
    }

    fn group(&mut self, calls: impl FnOnce(&mut W) -> Result<(), String>) -> Result<(), HostsError> {
        self.wire.group_start().map_err(HostsError::Nccl)?;
        let made = calls(self.wire);
        // A group that was begun must be ended, whatever became of its calls.
        let ended = self.wire.group_end();
        made.and(ended).map_err(HostsError::Nccl)
    }
}
