//! Moves rows between GPUs that have mapped each other's memory: a single kernel reads or writes the memory of all of
//! them.

use std::sync::Arc;
use std::time::Duration;

use semmoe_kernels::Element;
use semmoe_kernels::collectives::NormIn;

use super::mover::{
    MoveError, Region, Room, RowMover, SentRows, SplitRows, Stream, check_room, cut, padded, write_list,
};
use super::routed::{ArrivedRows, RoutedMover, RoutedTokens};
use super::space::{DeviceRows, Gpu};
use crate::calls::{Allgather, RowOrder, Rows};
use crate::error::{LaunchError, Stopped};
use crate::exchange::{Combine, Dispatch, Received};
use crate::launch::Launch;
use crate::params::{MAX_RANKS, SIGNAL_BYTES, SORT_THREADS};
use crate::runner::{Accelerator, Runner};
use crate::team::{Buffer, Team, count};

/// A rank's stream and memory on a GPU, before it has mapped the memory of other ranks.
pub struct LocalRank {
    /// The rank's stream, which keeps the memory of all ranks in this process alive.
    pub runner: Arc<dyn Accelerator + Sync>,
    /// Identifies the GPU within this host.
    pub gpu: String,
    /// The zeroed word in which the rank's kernels report errors.
    pub report: Buffer,
    /// How long the rank's kernels wait for another rank.
    pub timeout: Duration,
    /// Zeroed memory of [`SIGNAL_BYTES`] bytes that the other ranks access.
    pub signals: Buffer,
    /// Memory of [`Room::symmetric_bytes`] bytes that the other ranks access.
    pub symmetric: Buffer,
    /// Memory of [`Room::own_bytes`] bytes that only this rank accesses.
    pub own: Buffer,
}

/// Stream, team and memory of one rank of a unit, before its first call.
pub struct UnitRank {
    /// The rank's stream, which keeps the memory of all ranks alive.
    pub runner: Arc<dyn Accelerator + Sync>,
    /// The team of all ranks.
    pub team: Team,
    /// `[P]`: each rank's symmetric memory.
    pub symmetric: Vec<Buffer>,
    /// Memory that only this rank uses.
    pub own: Buffer,
}

impl LocalRank {
    /// Joins a unit as rank `rank`. `signals` and `symmetric` are `[P]`, as mapped on this rank's GPU.
    ///
    /// # Errors
    /// See [`Team::new`].
    pub fn join(self, rank: usize, signals: &[Buffer], symmetric: Vec<Buffer>) -> Result<UnitRank, LaunchError> {
        let Self { runner, report, timeout, own, .. } = self;
        let team = Team::new(signals, rank as u32, &[report], timeout)?;
        Ok(UnitRank { runner, team, symmetric, own })
    }

    /// Joins all ranks of a unit that consists of this process; returns them in rank order.
    ///
    /// # Errors
    /// See [`Team::new`].
    pub fn join_all(ranks: Vec<Self>) -> Result<Vec<UnitRank>, LaunchError> {
        let signals: Vec<Buffer> = ranks.iter().map(|rank| rank.signals).collect();
        let symmetric: Vec<Buffer> = ranks.iter().map(|rank| rank.symmetric).collect();
        ranks.into_iter().enumerate().map(|(rank, local)| local.join(rank, &signals, symmetric.clone())).collect()
    }
}

/// One rank that has mapped the memory of its peers.
pub struct PeerMemory<R> {
    team: Team,
    stream: Stream<R>,
    /// For each part of the symmetric memory, the buffer on each rank: the regions, then the arrays that the dispatch
    /// kernel writes along with the rows.
    parts: [Vec<Buffer>; 5],
    /// Row counts of a dispatch, stored at the end of this rank's signals.
    counts: Buffer,
    /// Offsets of each source rank's rows, written by the kernel and also computed by the host.
    source_offsets: Buffer,
    /// The experts of tokens, all -1: labels and weights stay on the host.
    no_experts: Buffer,
}

impl Room {
    /// Sizes of the symmetric parts: rows, sums, and the tokens, experts and weights of received rows.
    fn symmetric(&self) -> [u64; 5] {
        let routes = self.numbers() * self.top_k as u64;
        [self.region(), self.region(), self.numbers(), routes, routes]
    }

    fn beside(&self) -> [u64; 3] {
        [self.scratch_bytes(), 4 * (self.ranks as u64 + 1), self.numbers()]
    }

    /// Returns the size of each rank's symmetric memory for [`PeerMemory`].
    pub fn symmetric_bytes(&self) -> u64 {
        padded(&self.symmetric())
    }

    /// Returns the size of each rank's own memory for [`PeerMemory`].
    pub fn own_bytes(&self) -> u64 {
        padded(&self.beside())
    }
}

impl<R: Runner> PeerMemory<R> {
    /// Creates one rank of a team that [`Team::new`] created with `signals`.
    ///
    /// - `symmetric` `[P]`: each rank's memory, at least [`Room::symmetric_bytes`]
    /// - `own`: memory of this rank, at least [`Room::own_bytes`]
    ///
    /// # Errors
    /// If memory is too small or the driver fails.
    ///
    /// # Safety
    /// All memory must be mapped on the runner's GPU, and only the values of these ranks may use it, for as long as any
    /// of them lives.
    pub unsafe fn new(room: Room, team: Team, symmetric: &[Buffer], own: Buffer, runner: R) -> Result<Self, MoveError> {
        count("symmetric memory", symmetric.len(), team.ranks())?;
        let mut parts: [Vec<Buffer>; 5] = Default::default();
        for &memory in symmetric {
            let cut = cut("symmetric memory", memory, room.symmetric())?;
            parts.iter_mut().zip(cut).for_each(|(parts, part)| parts.push(part));
        }
        let [scratch, source_offsets, no_experts] = cut("own memory", own, room.beside())?;
        let bytes = 4 * MAX_RANKS as u64;
        let counts = Buffer { address: team.local_signals()[0] + SIGNAL_BYTES - bytes, bytes };
        // SAFETY: upheld by the caller.
        let stream = unsafe { Stream::new(runner, &room, scratch)? };
        // SAFETY: as above.
        unsafe { write_list(&stream.runner, "own memory", &vec![-1i32; room.rows], no_experts)? };
        Ok(Self { team, stream, parts, counts, source_offsets, no_experts })
    }

    /// Whether the team has a single rank, which sends all tokens to itself, in order.
    fn is_alone(&self) -> bool {
        self.team.ranks() == 1
    }

    /// Copies a call's rows from one buffer to another.
    fn copy(&self, from: Buffer, to: Buffer, call: SentRows<'_>) -> Result<(), MoveError> {
        let bytes = call.rows.bytes_of(call.sent[0].into());
        check_room("rows", to, bytes)?;
        match bytes {
            0 => Ok(()),
            // SAFETY: `DeviceRows` guarantees that its rows are valid, and the caller of `new` guarantees the rest.
            _ => unsafe { self.stream.runner.copy(from, Buffer { bytes, ..to }) }.map_err(MoveError::Device),
        }
    }

    /// Returns the launches that plan and run a dispatch.
    fn dispatch_launches(&self, call: &RoutedTokens, x: Buffer) -> Result<[Launch; 2], MoveError> {
        let [rows, _, tokens, experts, weights] = &self.parts;
        let dispatch = Dispatch {
            tokens: &[call.rows.tokens],
            hidden: call.rows.hidden,
            dtype: call.rows.dtype,
            top_k: call.top_k,
            experts_in_all: call.num_experts,
            rank_of_expert: call.rank_of_expert.as_ref().map(std::slice::from_ref),
            x: &[x],
            experts: &[call.experts],
            weights: &[call.weights],
            sent_rows: &[self.stream.places],
            source_offsets: &[self.source_offsets],
            received: Received { capacity: call.capacity, rows, tokens, experts, weights },
        };
        Ok(dispatch.launches(&self.team, self.stream.runner.grid(), SORT_THREADS)?)
    }

    /// Adds up the sums of a dispatch's rows, of which no rank has more than `capacity`.
    fn reduce_sums(&self, rows: Rows, capacity: u64, out: Buffer) -> Result<(), MoveError> {
        let launch = Combine {
            tokens: &[rows.tokens],
            hidden: rows.hidden,
            dtype: rows.dtype,
            capacity,
            sums: &self.parts[Region::Sums as usize],
            sent_rows: &[self.stream.places],
            out: &[out],
        }
        .launch(&self.team, self.stream.runner.grid())?;
        // SAFETY: rows come from `DeviceRows`, which guarantees that they are valid; the caller of `new` guarantees the
        // rest.
        unsafe { self.stream.launch(&launch) }
    }

    /// Returns the number of rows of `row_bytes` bytes that fit on every rank.
    fn capacity(&self, row_bytes: u64) -> u64 {
        let [rows, _, tokens, ..] = self.parts.each_ref().map(|of| of.first().map_or(0, |part| part.bytes));
        (tokens / 4).min(rows / row_bytes.max(1))
    }
}

impl<R: Runner, T: Element> RowMover<T> for PeerMemory<R> {
    fn region(&self, region: Region) -> Buffer {
        self.parts[region as usize][self.team.first_rank()]
    }

    fn stopped(&self) -> Option<Stopped> {
        Stopped::from_report(self.stream.runner.report())
    }

    fn reduce_scatter(
        &mut self,
        call: SplitRows<'_>,
        norm: Option<NormIn<'_, T, Gpu>>,
        out: DeviceRows<'_, T>,
    ) -> Result<(), MoveError> {
        let (split, parts) = (self.stream.split(call.split)?, &self.parts[Region::Rows as usize]);
        self.stream.reduce_scatter(&self.team, parts, call.rows, split.get(), norm.as_ref(), out)
    }

    fn allgather(
        &mut self,
        call: SplitRows<'_>,
        own: DeviceRows<'_, T>,
        out: DeviceRows<'_, T>,
    ) -> Result<(), MoveError> {
        let split = self.stream.split(call.split)?;
        let launch = Allgather {
            from: &[own.buffer()],
            out: &self.parts[Region::Rows as usize],
            order: RowOrder {
                rows: call.rows,
                split: split.get(),
                capacity: call.split.positions(self.team.first_rank()).len() as u64,
                multicast: None,
            },
        }
        .launch(&self.team, self.stream.runner.grid())?;
        let gathered = RowMover::<T>::region(self, Region::Rows);
        // SAFETY: `DeviceRows` guarantees that its rows are valid, and the caller of `new` guarantees the rest.
        unsafe {
            self.stream.launch(&launch)?;
            match out.is_empty() {
                true => Ok(()),
                false => self.stream.runner.copy(gathered, out.buffer()).map_err(MoveError::Device),
            }
        }
    }

    fn dispatch(&mut self, call: SentRows<'_>, x: DeviceRows<'_, T>) -> Result<(), MoveError> {
        if self.is_alone() {
            let to = RowMover::<T>::region(self, Region::Rows);
            return self.copy(x.buffer(), to, call);
        }
        self.stream.write_places(call.places)?;
        // SAFETY: the kernel of the last dispatch ended only after the peers had read its counts.
        unsafe { write_list(&self.stream.runner, "counts", call.sent, self.counts)? };
        let none = self.no_experts;
        let unrouted = RoutedTokens {
            rows: call.rows,
            top_k: 1,
            num_experts: 1,
            experts: none,
            weights: none,
            rank_of_expert: None,
            capacity: self.capacity(call.rows.bytes_of(1)),
        };
        let [_, exchange] = self.dispatch_launches(&unrouted, x.buffer())?;
        // SAFETY: `DeviceRows` guarantees that its rows are valid, and the caller of `new` guarantees the rest.
        unsafe { self.stream.launch(&exchange) }
    }

    fn combine(&mut self, call: SentRows<'_>, out: DeviceRows<'_, T>) -> Result<(), MoveError> {
        if self.is_alone() {
            return self.copy(RowMover::<T>::region(self, Region::Sums), out.buffer(), call);
        }
        self.reduce_sums(call.rows, self.capacity(call.rows.bytes_of(1)), out.buffer())
    }
}

impl<R: Runner, T: Element> RoutedMover<T> for PeerMemory<R> {
    fn dispatch_routed(&mut self, call: &RoutedTokens, x: DeviceRows<'_, T>) -> Result<ArrivedRows, MoveError> {
        for launch in self.dispatch_launches(call, x.buffer())? {
            // SAFETY: `DeviceRows` guarantees that its rows are valid, and the caller of `new` guarantees the rest.
            unsafe { self.stream.launch(&launch)? };
        }
        let [rows, sums, _, experts, weights] = self.parts.each_ref().map(|part| part[self.team.first_rank()]);
        let count = Buffer { bytes: 4, ..self.source_offsets.from_offset(4 * self.team.ranks() as u64) };
        Ok(ArrivedRows { rows, sums, experts, weights, count })
    }

    fn combine_routed(&mut self, call: &RoutedTokens, out: DeviceRows<'_, T>) -> Result<(), MoveError> {
        self.reduce_sums(call.rows, call.capacity, out.buffer())
    }
}
