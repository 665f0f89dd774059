//! Moves rows between GPUs once the ranks have agreed on a call.

use semmoe_kernels::collectives::NormIn;
use semmoe_kernels::{Dtype, Element, RowSplit};

use super::space::{DeviceRows, Gpu};
use crate::calls::{OwnSplit, ReduceScatter, ReduceScatterNorm, RowOrder, Rows, Split};
use crate::error::{GpuError, LaunchError, Stopped};
use crate::launch::Launch;
use crate::runner::Runner;
use crate::team::{Buffer, Team};

/// A memory region that the collectives reserve for rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Region {
    /// The partial sums of a reduce-scatter, or the rows of a dispatch.
    Rows,
    /// The sums that [`combine`](RowMover::combine) reduces.
    Sums,
}

/// The n tokens of all ranks, and how they are split.
#[derive(Clone, Copy, Debug)]
pub struct SplitRows<'a> {
    /// n, H
    pub rows: Rows,
    /// The split of the tokens over the ranks.
    pub split: RowSplit<'a>,
}

/// The rows that this rank sends and receives in a dispatch.
#[derive(Clone, Copy, Debug)]
pub struct SentRows<'a> {
    /// n of this rank, H
    pub rows: Rows,
    /// `[n, P]`: the index of each token among the rows sent to each rank, or -1.
    pub places: &'a [i32],
    /// `[P]`: rows for each rank.
    pub sent: &'a [u32],
    /// `[P]`: rows from each rank.
    pub received: &'a [u32],
}

/// One rank's end of a transport for rows of `T`. The caller has checked all lengths, and every rank makes the same
/// call. Calls do not wait for the GPU: results are ready once the rank's stream has passed the call.
pub trait RowMover<T: Element>: Send {
    /// The whole region.
    fn region(&self, region: Region) -> Buffer;

    /// Returns the status of the kernel that stopped, if any.
    fn stopped(&self) -> Option<Stopped>;

    /// Reduces [`Region::Rows`] over all ranks.
    ///
    /// # Errors
    /// See [`MoveError`].
    fn reduce_scatter(
        &mut self,
        call: SplitRows<'_>,
        norm: Option<NormIn<'_, T, Gpu>>,
        out: DeviceRows<'_, T>,
    ) -> Result<(), MoveError>;

    /// Gathers the rows of all ranks: `own` is `[m, H]`, `out` is `[n, H]`.
    ///
    /// # Errors
    /// See [`MoveError`].
    fn allgather(
        &mut self,
        call: SplitRows<'_>,
        own: DeviceRows<'_, T>,
        out: DeviceRows<'_, T>,
    ) -> Result<(), MoveError>;

    /// Copies rows of `x` into [`Region::Rows`] of the destination ranks.
    ///
    /// # Errors
    /// See [`MoveError`].
    fn dispatch(&mut self, call: SentRows<'_>, x: DeviceRows<'_, T>) -> Result<(), MoveError>;

    /// Reduces [`Region::Sums`] over the ranks that received rows in the last dispatch, whose `call` must be passed
    /// again.
    ///
    /// # Errors
    /// See [`MoveError`].
    fn combine(&mut self, call: SentRows<'_>, out: DeviceRows<'_, T>) -> Result<(), MoveError>;
}

/// Why rows could not be moved.
#[derive(Debug, thiserror::Error)]
pub enum MoveError {
    /// The call was rejected before its launch, or memory is too small.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The driver's message.
    #[error("the GPU refused: {0}")]
    Device(#[source] GpuError),
    /// NCCL's message.
    #[error("NCCL refused: {0}")]
    Nccl(#[source] GpuError),
}

/// The largest calls that fit in a rank's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room {
    /// P
    pub ranks: usize,
    /// Maximum number of rows in a part, and in a dispatch to one rank.
    pub rows: usize,
    /// H
    pub hidden: usize,
    /// k: experts per row if the GPU plans dispatches ([`RoutedMover`](super::RoutedMover)), otherwise 1.
    pub top_k: usize,
    /// Element type of the rows.
    pub dtype: Dtype,
}

impl Room {
    /// Bytes of a region.
    pub(crate) fn region(&self) -> u64 {
        (self.rows * self.hidden * self.dtype.bytes()) as u64
    }

    /// Size of an array with one 32-bit number per row.
    pub(crate) fn numbers(&self) -> u64 {
        4 * self.rows as u64
    }

    /// Sizes of the permutation, the offsets and the places.
    fn scratch(&self) -> [u64; 3] {
        [self.numbers(), 4 * (self.ranks as u64 + 1), self.numbers() * self.ranks as u64]
    }

    /// Returns the size of a rank's own memory.
    pub fn scratch_bytes(&self) -> u64 {
        padded(&self.scratch())
    }
}

/// Alignment of each part of an allocation.
const PART_ALIGNMENT: u64 = 256;

/// Returns the size of all parts, including padding.
pub(crate) fn padded(sizes: &[u64]) -> u64 {
    sizes.iter().map(|bytes| bytes.next_multiple_of(PART_ALIGNMENT)).sum()
}

/// Splits an allocation into parts.
pub(crate) fn cut<const N: usize>(
    what: &'static str,
    memory: Buffer,
    sizes: [u64; N],
) -> Result<[Buffer; N], MoveError> {
    check_room(what, memory, padded(&sizes))?;
    let mut address = memory.address;
    Ok(sizes.map(|bytes| {
        let part = Buffer { address, bytes };
        address += bytes.next_multiple_of(PART_ALIGNMENT);
        part
    }))
}

/// Checks that memory has at least `expected` bytes.
pub(crate) fn check_room(what: &'static str, memory: Buffer, expected: u64) -> Result<(), MoveError> {
    match memory.bytes {
        found if found < expected => Err(LaunchError::TooSmall { what, index: 0, found, expected }.into()),
        _ => Ok(()),
    }
}

/// This rank's stream, and memory for the arrays that the host passes to kernels.
pub(crate) struct Stream<R> {
    pub(crate) runner: R,
    permutation: WrittenList,
    offsets: WrittenList,
    /// The places as written by the host or left by the dispatch kernel.
    pub(crate) places: Buffer,
}

/// A list that the host writes into a rank's own memory, only if it differs from the last one.
struct WrittenList {
    what: &'static str,
    memory: Buffer,
    last: Vec<u32>,
}

impl WrittenList {
    fn new(what: &'static str, memory: Buffer) -> Self {
        Self { what, memory, last: Vec::new() }
    }

    /// Returns the buffer that contains `numbers`.
    fn write(&mut self, numbers: &[u32], runner: &impl Runner) -> Result<[Buffer; 1], MoveError> {
        if self.last != numbers {
            self.last.clear();
            // SAFETY: the memory belongs to this rank.
            unsafe { write_list(runner, self.what, numbers, self.memory)? };
            self.last.extend_from_slice(numbers);
        }
        Ok([Buffer { bytes: size_of_val(numbers) as u64, ..self.memory }])
    }
}

/// Writes numbers to the beginning of a buffer.
///
/// # Safety
/// `to` must be memory of the runner's GPU.
pub(crate) unsafe fn write_list<N: bytemuck::Pod>(
    runner: &impl Runner,
    what: &'static str,
    numbers: &[N],
    to: Buffer,
) -> Result<(), MoveError> {
    let bytes = bytemuck::cast_slice::<N, u8>(numbers);
    check_room(what, to, bytes.len() as u64)?;
    if bytes.is_empty() {
        return Ok(());
    }
    // SAFETY: the caller guarantees that `to` is memory of this GPU, and its size was checked.
    unsafe { runner.write(bytes, to) }.map_err(MoveError::Device)
}

impl<R: Runner> Stream<R> {
    /// # Safety
    /// `scratch` must remain memory of the runner's GPU for as long as the value exists.
    pub(crate) unsafe fn new(runner: R, room: &Room, scratch: Buffer) -> Result<Self, MoveError> {
        let [permutation, offsets, places] = cut("scratch", scratch, room.scratch())?;
        let permutation = WrittenList::new("a permutation", permutation);
        Ok(Self { runner, permutation, offsets: WrittenList::new("offsets", offsets), places })
    }

    /// Writes the permutation of a split; returns `None` if tokens keep their order.
    pub(crate) fn permutation(&mut self, split: RowSplit<'_>) -> Result<Option<[Buffer; 1]>, MoveError> {
        split.permutation().map(|order| self.permutation.write(order, &self.runner)).transpose()
    }

    /// Writes the permutation and the offsets of a split.
    pub(crate) fn split(&mut self, split: RowSplit<'_>) -> Result<OwnSplit, MoveError> {
        Ok(OwnSplit { permutation: self.permutation(split)?, offsets: Some(self.offsets(split.offsets())?) })
    }

    pub(crate) fn offsets(&mut self, offsets: &[u32]) -> Result<[Buffer; 1], MoveError> {
        self.offsets.write(offsets, &self.runner)
    }

    pub(crate) fn write_places(&self, places: &[i32]) -> Result<(), MoveError> {
        // SAFETY: the scratch memory belongs to this rank.
        unsafe { write_list(&self.runner, "places", places, self.places) }
    }

    /// # Safety
    /// See [`Runner::launch`].
    pub(crate) unsafe fn launch(&self, launch: &Launch) -> Result<(), MoveError> {
        // SAFETY: upheld by the caller.
        unsafe { self.runner.launch(launch) }.map_err(MoveError::Device)
    }

    /// Reduces into all rows of `out`, with the norm if there is one.
    pub(crate) fn reduce_scatter<T: Element>(
        &self,
        team: &Team,
        parts: &[Buffer],
        rows: Rows,
        split: Split<'_>,
        norm: Option<&NormIn<'_, T, Gpu>>,
        out: DeviceRows<'_, T>,
    ) -> Result<(), MoveError> {
        let capacity = out.len() as u64 / rows.hidden.max(1);
        let reduce =
            ReduceScatter { parts, out: &[out.buffer()], order: RowOrder { rows, split, capacity, multicast: None } };
        let launch = match norm {
            None => reduce.launch(team, self.runner.grid())?,
            Some(norm) => ReduceScatterNorm {
                reduce,
                residual: &[norm.residual.buffer()],
                weight: &[norm.weight.buffer()],
                residual_out: &[norm.residual_out.buffer()],
                epsilon: norm.epsilon,
            }
            .launch(team, self.runner.grid().for_norm())?,
        };
        // SAFETY: `DeviceRows` guarantees that its rows are valid; the parts are memory of this mover and its peers.
        unsafe { self.launch(&launch) }
    }
}
