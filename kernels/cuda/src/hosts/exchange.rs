//! Dispatch and combine between hosts: each rank's rows as one segment, sent and received in a group.

use semmoe_kernels::Dtype;

use super::{Hosts, HostsError, Kind, Runner, Span, Wire, room};
use crate::calls::{ELEMENT_ALIGNMENT, by_type};
use crate::exchange::MAX_TOP_K;
use crate::launch::{Grid, Launch};
use crate::params::{
    CombineParams, DispatchParams, LaunchParams, MAX_LOCAL, MAX_RANKS, PackParams, Peers, PlanParams, SIGNAL_BYTES,
    SORT_THREADS, TeamParams, UnpackParams,
};
use crate::team::{Buffer, in_range};

/// The tokens of one rank with their routes.
#[derive(Clone, Copy, Debug)]
pub struct Routed {
    /// n of this rank.
    pub tokens: u64,
    /// H
    pub hidden: u64,
    /// Of the rows.
    pub dtype: Dtype,
    /// k
    pub top_k: u64,
    /// N
    pub experts_in_all: u64,
    /// `[N]`
    pub rank_of_expert: Buffer,
    /// `[n, H]`; not needed for the plan.
    pub x: Buffer,
    /// `[n, k]` i32; -1: the slot is not used.
    pub experts: Buffer,
    /// `[n, k]` f32; not needed for the plan.
    pub weights: Buffer,
    /// `[n, P]` i32, out of the plan: place of the token in the segment of each rank, or -1.
    pub places: Buffer,
}

impl Routed {
    fn row_bytes(&self) -> u64 {
        self.hidden.saturating_mul(self.dtype.bytes() as u64)
    }
}

/// Rows that this rank sends to each rank, and receives from each: what [`Hosts::plan`] told, on the host.
#[derive(Clone, Copy, Debug)]
pub struct Counts<'a> {
    /// `[P]`
    pub sent: &'a [u32],
    /// `[P]`
    pub received: &'a [u32],
}

/// Segments of rows with what belongs to them, by rank: what is sent, or what was received.
#[derive(Clone, Copy, Debug)]
pub struct Segments {
    /// `[rows, H]`
    pub rows: Buffer,
    /// `[rows]` i32: the token's index on its source.
    pub tokens: Buffer,
    /// `[rows, k]` i32: the experts on the destination, then -1.
    pub experts: Buffer,
    /// `[rows, k]` f32: their weights, then 0.
    pub weights: Buffer,
}

impl Segments {
    /// Each array with the bytes of one row's part, and what it counts by: how many, of which kind.
    fn arrays(&self, call: &Routed) -> [(&'static str, Buffer, u64, Kind); 4] {
        [
            ("segment rows", self.rows, call.hidden, Kind::Element(call.dtype)),
            ("segment tokens", self.tokens, 1, Kind::Int32),
            ("segment experts", self.experts, call.top_k, Kind::Int32),
            ("segment weights", self.weights, call.top_k, Kind::Float32),
        ]
    }

    fn check(&self, call: &Routed, rows: u64) -> Result<(), HostsError> {
        for (what, buffer, each, kind) in self.arrays(call) {
            room(what, buffer, rows.saturating_mul(each).saturating_mul(kind.bytes()))?;
        }
        Ok(())
    }
}

/// The first row of each rank's segment, and behind the last.
fn begins(counts: &[u32]) -> Vec<u64> {
    let ends = counts.iter().scan(0u64, |end, &count| {
        *end += u64::from(count);
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

fn padded(counts: &[u32]) -> [u32; MAX_RANKS] {
    let mut list = [0; MAX_RANKS];
    for (slot, &count) in list.iter_mut().zip(counts) {
        *slot = count;
    }
    list
}

/// One rank's value at its only place in the launch.
fn only<T: Copy + Default>(value: T) -> [T; MAX_LOCAL] {
    let mut list = [T::default(); MAX_LOCAL];
    list[0] = value;
    list
}

impl<W: Wire, R: Runner> Hosts<'_, W, R> {
    /// Which token goes to which rank, and how many rows each rank gets: `places` of the call, and `counts` `[2, P]` u32, where this
    /// rank's own counts come first, then what each rank sends to it.
    ///
    /// # Errors
    /// Sizes or buffers that do not fit, before any launch; a driver or an NCCL that refuses.
    ///
    /// # Safety
    /// Buffers are memory of this rank's GPU until the stream has come past the call.
    pub unsafe fn plan(&mut self, call: &Routed, counts: Buffer) -> Result<(), HostsError> {
        let ranks = self.wire.ranks();
        let slots = call.tokens.saturating_mul(call.top_k).saturating_mul(4);
        let one = |what, buffer, bytes| self.team.locals(what, &[buffer], bytes, 4);
        one("counts", counts, 0)?;
        room("counts", counts, 8 * ranks as u64)?;
        let team = self.team.params();
        let params = PlanParams {
            experts: one("experts", call.experts, slots)?,
            rank_of_expert: one("rank of expert", call.rank_of_expert, call.experts_in_all.saturating_mul(4))?,
            places: one("places", call.places, call.tokens.saturating_mul(4 * ranks as u64))?,
            signals: self.team.local_signals(),
            report: team.report,
            tokens: only(in_range("tokens", call.tokens, 0, i32::MAX as u64 / ranks as u64)?),
            top_k: in_range("top-k", call.top_k, 1, MAX_TOP_K)?,
            experts_in_all: in_range("experts", call.experts_in_all, 1, i32::MAX as u64)?,
            ranks: in_range("ranks", ranks as u64, 1, MAX_RANKS as u64)?,
            padding: 0,
        };
        let grid = Grid { blocks: 1, threads: SORT_THREADS };
        let params = LaunchParams::Plan(params);
        let launch = Launch { kernel: "semmoe_dispatch_plan", grid, ranks: 1, params };
        // The plan leaves the counts at the end of the signals.
        let own = self.team.local_signals()[0] + SIGNAL_BYTES - 4 * MAX_RANKS as u64;
        let stream = self.stream;
        // SAFETY: the caller's promise.
        unsafe { self.run(Some(&launch))? };
        let word = |address| Span { address, count: 1, kind: Kind::Int32 };
        self.group(|wire| {
            let all = Span { address: own, count: ranks as u64, kind: Kind::Int32 };
            let own_rank = wire.rank();
            // SAFETY: counts has 2 P words, and the signals hold P; both are the caller's promise.
            unsafe {
                // To itself: NCCL copies, so that the host finds both in one array.
                wire.send(all, own_rank, stream)?;
                wire.receive(Span { address: counts.address, ..all }, own_rank, stream)?;
                for peer in 0..ranks as u64 {
                    wire.send(word(own + 4 * peer), peer as usize, stream)?;
                    wire.receive(word(counts.address + 4 * (ranks as u64 + peer)), peer as usize, stream)?;
                }
            }
            Ok(())
        })
    }

    /// Every token once to each rank that hosts one of its experts: `received` gets rows ordered by source, then by token. `staging` has
    /// room for all rows that are sent.
    ///
    /// # Errors
    /// Counts, sizes or buffers that do not fit, before any launch; a driver or an NCCL that refuses. Counts of another plan stop the
    /// kernel, or the ranks wait for one another, as NCCL does.
    ///
    /// # Safety
    /// Buffers are memory of this rank's GPU until the stream has come past the call; `places` is the plan's.
    pub unsafe fn dispatch(
        &mut self,
        call: &Routed,
        counts: Counts<'_>,
        staging: &Segments,
        received: &Segments,
    ) -> Result<(), HostsError> {
        let [sent, got] = self.check_counts(call.tokens, counts)?;
        staging.check(call, sent)?;
        received.check(call, got)?;
        let launch = self.pack(call, counts.sent, staging)?;
        let stream = self.stream;
        // SAFETY: the caller's promise.
        unsafe { self.run(Some(&launch))? };
        let pairs: Vec<_> = staging.arrays(call).into_iter().zip(received.arrays(call)).collect();
        let (to_send, to_receive) = (begins(counts.sent), begins(counts.received));
        self.group(|wire| {
            for &((_, from, each, kind), (_, to, ..)) in &pairs {
                let span = |buffer: Buffer, begin: u64, rows: u32| Span {
                    address: buffer.address + begin * each * kind.bytes(),
                    count: u64::from(rows) * each,
                    kind,
                };
                for (peer, (&going, &coming)) in counts.sent.iter().zip(counts.received).enumerate() {
                    // SAFETY: segments lie within the buffers, which have been checked; the memory is the caller's promise.
                    unsafe {
                        swap(wire, span(from, to_send[peer], going), span(to, to_receive[peer], coming), peer, stream)?
                    };
                }
            }
            Ok(())
        })
    }

    /// The sums of the ranks back to the tokens' owner, added in rank order: `sums` `[received rows, H]` of this rank, `staging` with
    /// room for all rows that it sent, `out` `[n, H]`.
    ///
    /// # Errors
    /// As for [`dispatch`](Self::dispatch).
    ///
    /// # Safety
    /// As for [`dispatch`](Self::dispatch).
    pub unsafe fn combine(
        &mut self,
        call: &Routed,
        counts: Counts<'_>,
        sums: Buffer,
        staging: Buffer,
        out: Buffer,
    ) -> Result<(), HostsError> {
        let [sent, got] = self.check_counts(call.tokens, counts)?;
        let row = call.row_bytes();
        room("sums", sums, got.saturating_mul(row))?;
        room("staging", staging, sent.saturating_mul(row))?;
        let launch = self.unpack(call, counts.sent, staging, out)?;
        let (came_back, went) = (begins(counts.sent), begins(counts.received));
        let (kind, hidden, stream) = (Kind::Element(call.dtype), call.hidden, self.stream);
        let span = |buffer: Buffer, begin: u64, rows: u32| Span {
            address: buffer.address + begin * row,
            count: u64::from(rows) * hidden,
            kind,
        };
        self.group(|wire| {
            for (peer, (&coming, &going)) in counts.sent.iter().zip(counts.received).enumerate() {
                // SAFETY: segments lie within the buffers, which have been checked; the memory is the caller's promise.
                unsafe {
                    swap(wire, span(sums, went[peer], going), span(staging, came_back[peer], coming), peer, stream)?
                };
            }
            Ok(())
        })?;
        // SAFETY: the caller's promise.
        unsafe { self.run(Some(&launch)) }
    }

    /// What is sent and what is received in all.
    fn check_counts(&self, tokens: u64, counts: Counts<'_>) -> Result<[u64; 2], HostsError> {
        let ranks = self.wire.ranks();
        for (what, list) in [("counts of sent rows", counts.sent), ("counts of received rows", counts.received)] {
            if list.len() != ranks {
                return Err(HostsError::Counts { what, found: list.len() as u64, expected: ranks as u64 });
            }
        }
        let most = counts.sent.iter().copied().max().map_or(0, u64::from);
        if most > tokens {
            return Err(HostsError::Counts { what: "rows for one rank", found: most, expected: tokens });
        }
        let rank = self.wire.rank();
        let (to_itself, from_itself) = (counts.sent[rank], counts.received[rank]);
        if to_itself != from_itself {
            let (found, expected) = (from_itself.into(), to_itself.into());
            return Err(HostsError::Counts { what: "rows from this rank to itself", found, expected });
        }
        Ok([counts.sent, counts.received].map(|list| list.iter().copied().map(u64::from).sum()))
    }

    /// All ranks' segments, as if each were another rank's memory.
    fn local_team(&self) -> Result<TeamParams, HostsError> {
        let own = self.team.params();
        let ranks = in_range("ranks", self.wire.ranks() as u64, 1, MAX_RANKS as u64)?;
        let first_rank = in_range("rank", self.wire.rank() as u64, 0, u64::from(ranks) - 1)?;
        Ok(TeamParams { ranks, first_rank, signals: [0; MAX_RANKS], ..own })
    }

    fn pack(&self, call: &Routed, sent: &[u32], staging: &Segments) -> Result<Launch, HostsError> {
        let slots = call.tokens.saturating_mul(call.top_k).saturating_mul(4);
        let ranks = self.wire.ranks() as u64;
        let one = |what, buffer, bytes, alignment| self.team.locals(what, &[buffer], bytes, alignment);
        let begins = begins(sent);
        let each = |buffer: Buffer, bytes: u64| -> Peers {
            let mut list = [0; MAX_RANKS];
            for (slot, begin) in list.iter_mut().zip(&begins).take(sent.len()) {
                *slot = buffer.address + begin * bytes;
            }
            list
        };
        one("segment rows", staging.rows, 0, ELEMENT_ALIGNMENT)?;
        for buffer in [staging.tokens, staging.experts, staging.weights] {
            one("segment routes", buffer, 0, 4)?;
        }
        let dispatch = DispatchParams {
            team: self.local_team()?,
            x: one("x", call.x, call.tokens.saturating_mul(call.row_bytes()), ELEMENT_ALIGNMENT)?,
            experts: one("experts", call.experts, slots, 4)?,
            weights: one("weights", call.weights, slots, 4)?,
            rank_of_expert: one("rank of expert", call.rank_of_expert, call.experts_in_all.saturating_mul(4), 4)?,
            sent_rows: one("places", call.places, call.tokens.saturating_mul(4 * ranks), 4)?,
            source_offsets: [0; MAX_LOCAL],
            rows: each(staging.rows, call.row_bytes()),
            tokens: each(staging.tokens, 4),
            row_experts: each(staging.experts, 4 * call.top_k),
            row_weights: each(staging.weights, 4 * call.top_k),
            local_tokens: only(in_range("tokens", call.tokens, 0, i32::MAX as u64 / ranks)?),
            hidden: in_range("hidden", call.hidden, 1, 1 << 20)?,
            top_k: in_range("top-k", call.top_k, 1, MAX_TOP_K)?,
            capacity: 0,
            padding: 0,
        };
        let kernel = if call.dtype.bytes() == 4 { "semmoe_pack_4" } else { "semmoe_pack_2" };
        let params = LaunchParams::Pack(PackParams { dispatch, limits: padded(sent) });
        Ok(Launch { kernel, grid: self.grid(), ranks: 1, params })
    }

    fn unpack(&self, call: &Routed, sent: &[u32], staging: Buffer, out: Buffer) -> Result<Launch, HostsError> {
        let ranks = self.wire.ranks() as u64;
        let one = |what, buffer, bytes, alignment| self.team.locals(what, &[buffer], bytes, alignment);
        one("staging", staging, 0, ELEMENT_ALIGNMENT)?;
        let mut sums = [0; MAX_RANKS];
        for (slot, begin) in sums.iter_mut().zip(begins(sent)).take(sent.len()) {
            *slot = staging.address + begin * call.row_bytes();
        }
        let combine = CombineParams {
            team: self.local_team()?,
            sums,
            sent_rows: one("places", call.places, call.tokens.saturating_mul(4 * ranks), 4)?,
            out: one("out", out, call.tokens.saturating_mul(call.row_bytes()), ELEMENT_ALIGNMENT)?,
            local_tokens: only(in_range("tokens", call.tokens, 0, i32::MAX as u64 / ranks)?),
            hidden: in_range("hidden", call.hidden, 1, 1 << 20)?,
            capacity: 0,
        };
        let kernel = by_type(call.dtype, ["semmoe_unpack_f32", "semmoe_unpack_f16", "semmoe_unpack_bf16"]);
        let params = LaunchParams::Unpack(UnpackParams { combine, limits: padded(sent) });
        Ok(Launch { kernel, grid: self.grid(), ranks: 1, params })
    }
}

/// Sends to and receives from one peer what there is.
///
/// # Safety
/// As for [`Wire::send`].
unsafe fn swap<W: Wire>(
    wire: &mut W,
    from: Span,
    to: Span,
    peer: usize,
    stream: *mut std::ffi::c_void,
) -> Result<(), String> {
    // SAFETY: the caller's promise.
    unsafe {
        if from.count > 0 {
            wire.send(from, peer, stream)?;
        }
        if to.count > 0 {
            wire.receive(to, peer, stream)?;
        }
    }
    Ok(())
}
