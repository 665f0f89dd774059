//! Ranks on several hosts, over NCCL. No peer's memory can be mapped, so a kernel orders rows in local memory, NCCL
//! moves each rank's segment, and a kernel adds up the received rows. All results equal the reference bit for bit: NCCL
//! adds nothing, because its order of additions depends on the network.

use semmoe_kernels::collectives::NormIn;
use semmoe_kernels::{Dtype, Element};

use crate::calls::{ELEMENT_ALIGNMENT, Rows, Shuffle, Split, by_type, collective};
use crate::error::{GpuError, Stopped};
use crate::params::{CombineParams, Local, MAX_LOCAL, MAX_RANKS, PackParams, Params, Peers, UnpackParams};
use crate::runner::Runner;
use crate::team::{Buffer, Team, count};
use crate::unit::{
    DeviceRows, Gpu, MoveError, Region, Room, RowMover, SentRows, SplitRows, Stream, check_room, cut, padded,
};

/// Consecutive elements in device memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// Address of the first element.
    pub address: u64,
    /// Elements.
    pub count: u64,
    /// Element type.
    pub dtype: Dtype,
}

/// One NCCL call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transfer {
    /// `ncclSend`
    Send {
        /// The elements.
        from: Span,
        /// The receiving rank.
        peer: usize,
    },
    /// `ncclRecv`
    Receive {
        /// The destination.
        to: Span,
        /// The sending rank.
        peer: usize,
    },
    /// `ncclBroadcast`
    Broadcast {
        /// Address of the elements; read on the root only.
        from: u64,
        /// The destination.
        to: Span,
        /// The sending rank.
        root: usize,
    },
}

/// One rank's end of an NCCL group, on the stream of its [`Runner`].
pub trait Wire: Send {
    /// This rank.
    fn rank(&self) -> usize;

    /// P
    fn ranks(&self) -> usize;

    /// Makes the calls together, as one NCCL group.
    ///
    /// # Errors
    /// NCCL's message; the NCCL group is ended nevertheless.
    ///
    /// # Safety
    /// All memory must belong to this rank's GPU until the stream has passed the group.
    unsafe fn group(&mut self, calls: &[Transfer]) -> Result<(), GpuError>;
}

/// One rank of a group that spans several hosts.
pub struct Hosts<W, R> {
    wire: W,
    team: Team,
    stream: Stream<R>,
    /// Buffers by [`Region`], and the staging buffer for NCCL.
    regions: [Buffer; 3],
}

/// Index of the staging buffer in the regions.
const STAGING: usize = 2;

impl Room {
    /// Returns the size of a rank's memory for [`Hosts`], which has three regions and scratch.
    pub fn hosts_bytes(&self) -> u64 {
        padded(&self.hosts())
    }

    fn hosts(&self) -> [u64; 4] {
        [self.region(), self.region(), self.region(), self.scratch_bytes()]
    }
}

/// Returns the first row of each rank's segment, and the end of the last segment.
fn begins(counts: &[u32]) -> Vec<u64> {
    let ends = counts.iter().scan(0u64, |end, &count| {
        *end += u64::from(count);
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

fn padded_list(counts: &[u32]) -> [u32; MAX_RANKS] {
    let mut list = [0; MAX_RANKS];
    list.iter_mut().zip(counts).for_each(|(slot, &count)| *slot = count);
    list
}

/// Returns the address of each rank's segment.
fn segments(memory: Buffer, counts: &[u32], row_bytes: u64) -> Peers {
    let mut list = [0; MAX_RANKS];
    let segments = list.iter_mut().zip(begins(counts)).take(counts.len());
    segments.for_each(|(slot, begin)| *slot = memory.address + begin * row_bytes);
    list
}

impl<W: Wire, R: Runner> Hosts<W, R> {
    /// Creates one rank, with a team from [`Team::alone`] and at least [`Room::hosts_bytes`] of memory.
    ///
    /// # Errors
    /// If memory is too small.
    ///
    /// # Safety
    /// The memory must be on the runner's GPU, and only this value may use it, for as long as it lives.
    pub unsafe fn new(room: Room, team: Team, memory: Buffer, wire: W, runner: R) -> Result<Self, MoveError> {
        count("NCCL's group", wire.ranks(), team.ranks())?;
        let [rows, sums, staging, scratch] = cut("memory", memory, room.hosts())?;
        // SAFETY: upheld by the caller.
        let stream = unsafe { Stream::new(runner, &room, scratch)? };
        Ok(Self { wire, team, stream, regions: [rows, sums, staging] })
    }

    fn shuffle(
        &self,
        rows: Rows,
        permutation: &[Buffer; 1],
        [from, to]: [Buffer; 2],
        back: bool,
    ) -> Result<(), MoveError> {
        let shuffle = Shuffle { from: &[from], to: &[to], permutation, rows, back };
        // SAFETY: `DeviceRows` guarantees that its rows are valid, and the caller of `new` guarantees the rest.
        unsafe { self.stream.launch(&shuffle.launch(&self.team, self.stream.runner.grid())?) }
    }

    /// Sends a segment of memory to each rank and receives each rank's segment, both in rank order.
    fn swap(&mut self, rows: Rows, from: [&[u32]; 2], memory: [Buffer; 2]) -> Result<(), MoveError> {
        let row = rows.bytes_of(1);
        let mut calls = Vec::with_capacity(2 * self.wire.ranks());
        for (which, (counts, memory)) in from.into_iter().zip(memory).enumerate() {
            check_room("segments", memory, rows.bytes_of(counts.iter().map(|&count| u64::from(count)).sum()))?;
            for (peer, (&count, begin)) in counts.iter().zip(begins(counts)).enumerate().filter(|(_, (n, _))| **n > 0) {
                let (address, count) = (memory.address + begin * row, u64::from(count) * rows.hidden);
                let span = Span { address, count, dtype: rows.dtype };
                calls.push(match which {
                    0 => Transfer::Send { from: span, peer },
                    _ => Transfer::Receive { to: span, peer },
                });
            }
        }
        // SAFETY: all segments are within this rank's memory, whose size has been checked.
        unsafe { self.wire.group(&calls) }.map_err(MoveError::Nccl)
    }

    fn launch<P: Params>(&self, kernel: &'static str, params: &P) -> Result<(), MoveError> {
        // SAFETY: `DeviceRows` guarantees that its rows are valid, and the caller of `new` guarantees the rest.
        unsafe { self.stream.launch(&collective(kernel, &self.team, self.stream.runner.grid(), params)?) }
    }

    fn one(&self, what: &'static str, buffer: Buffer, bytes: u64) -> Result<Local, MoveError> {
        Ok(self.team.locals(what, &[buffer], bytes, ELEMENT_ALIGNMENT)?)
    }

    fn places(&self, call: SentRows<'_>) -> Result<Local, MoveError> {
        self.one("places", self.stream.places, call.places.len() as u64 * 4)
    }

    fn tokens(&self, rows: Rows) -> Result<[u32; MAX_LOCAL], MoveError> {
        Ok(self.team.counts("tokens", &[rows.tokens], i32::MAX as u64 / self.wire.ranks() as u64)?)
    }
}

impl<W: Wire, R: Runner, T: Element> RowMover<T> for Hosts<W, R> {
    fn region(&self, region: Region) -> Buffer {
        self.regions[region as usize]
    }

    fn stopped(&self) -> Option<Stopped> {
        Stopped::from_report(self.stream.runner.report())
    }

    /// Orders the rows by rank, sends each segment to its rank, and adds up the received segments.
    fn reduce_scatter(
        &mut self,
        call: SplitRows<'_>,
        norm: Option<NormIn<'_, T, Gpu>>,
        out: DeviceRows<'_, T>,
    ) -> Result<(), MoveError> {
        let ([rows, came, staging], SplitRows { rows: all, split }) = (self.regions, call);
        let (me, ranks) = (self.wire.rank(), self.wire.ranks());
        let own = split.positions(me);
        let permutation = self.stream.permutation(split)?;
        if let Some(order) = &permutation {
            self.shuffle(all, order, [rows, staging], false)?;
        }
        let sent: Vec<u32> = split.offsets().windows(2).map(|ends| ends[1] - ends[0]).collect();
        let received = vec![own.len() as u32; ranks];
        self.swap(all, [&sent, &received], [if permutation.is_some() { staging } else { rows }, came])?;
        let norm = norm.map(|norm| {
            let mut residual = norm.residual.buffer();
            if let Some(order) = &permutation {
                self.shuffle(all, order, [residual, staging], false)?;
                residual = staging;
            }
            let residual = DeviceRows::of(residual.from_offset(all.bytes_of(own.start as u64)));
            Ok::<_, MoveError>(NormIn { residual, ..norm })
        });
        let norm = norm.transpose()?;
        // Each part contains only this rank's rows, which start at 0.
        let offsets: Vec<u32> = (0..=ranks).map(|rank| if rank > me { own.len() as u32 } else { 0 }).collect();
        let part = all.bytes_of(own.len() as u64);
        let parts: Vec<Buffer> =
            (0..ranks as u64).map(|rank| Buffer { address: came.address + rank * part, bytes: part }).collect();
        let rows = Rows { tokens: own.len() as u64, ..all };
        let split = Split { permutation: None, offsets: Some(&self.stream.offsets(&offsets)?) };
        self.stream.reduce_scatter(&self.team, &parts, rows, split, norm.as_ref(), out)
    }

    /// Makes one broadcast per rank, which NCCL sends to each host once, then orders the rows by token.
    fn allgather(
        &mut self,
        call: SplitRows<'_>,
        own: DeviceRows<'_, T>,
        out: DeviceRows<'_, T>,
    ) -> Result<(), MoveError> {
        let (all, dtype) = (call.rows, call.rows.dtype);
        let permutation = self.stream.permutation(call.split)?;
        let to = if permutation.is_some() { self.regions[STAGING] } else { out.buffer() };
        check_room("all rows", to, all.bytes_of(all.tokens))?;
        let broadcast = |(root, ends): (usize, &[u32])| {
            let address = to.address + all.bytes_of(ends[0].into());
            let to = Span { address, count: u64::from(ends[1] - ends[0]) * all.hidden, dtype };
            (to.count > 0).then_some(Transfer::Broadcast { from: own.buffer().address, to, root })
        };
        let calls: Vec<Transfer> = call.split.offsets().windows(2).enumerate().filter_map(broadcast).collect();
        // SAFETY: the rows of all ranks are within `to`, and `DeviceRows` guarantees that this rank's rows are valid.
        unsafe { self.wire.group(&calls) }.map_err(MoveError::Nccl)?;
        permutation.map_or(Ok(()), |order| self.shuffle(all, &order, [to, out.buffer()], true))
    }

    fn dispatch(&mut self, call: SentRows<'_>, x: DeviceRows<'_, T>) -> Result<(), MoveError> {
        let ([rows, _, staging], row) = (self.regions, call.rows.bytes_of(1));
        self.stream.write_places(call.places)?;
        let sent = call.sent.iter().map(|&count| u64::from(count)).sum();
        check_room("rows to send", staging, call.rows.bytes_of(sent))?;
        let params = PackParams {
            team: self.team.params(),
            x: self.one("x", x.buffer(), call.rows.bytes_of(call.rows.tokens))?,
            places: self.places(call)?,
            rows: segments(staging, call.sent, row),
            limits: padded_list(call.sent),
            local_tokens: self.tokens(call.rows)?,
            hidden: call.rows.check()?.1,
            padding: 0,
        };
        let kernel = if T::DTYPE.bytes() == 4 { "semmoe_pack_4" } else { "semmoe_pack_2" };
        self.launch(kernel, &params)?;
        self.swap(call.rows, [call.sent, call.received], [staging, rows])
    }

    fn combine(&mut self, call: SentRows<'_>, out: DeviceRows<'_, T>) -> Result<(), MoveError> {
        let ([_, sums, staging], row) = (self.regions, call.rows.bytes_of(1));
        self.swap(call.rows, [call.received, call.sent], [sums, staging])?;
        let combine = CombineParams {
            team: self.team.params(),
            sums: segments(staging, call.sent, row),
            sent_rows: self.places(call)?,
            out: self.one("out", out.buffer(), call.rows.bytes_of(call.rows.tokens))?,
            local_tokens: self.tokens(call.rows)?,
            hidden: call.rows.check()?.1,
            capacity: 0,
        };
        let kernel = by_type(T::DTYPE, ["semmoe_unpack_f32", "semmoe_unpack_f16", "semmoe_unpack_bf16"]);
        self.launch(kernel, &UnpackParams { combine, limits: padded_list(call.sent) })
    }
}
