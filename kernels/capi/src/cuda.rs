//! The CUDA device: each call becomes checked launches of `semmoe-kernels-cuda` on the caller's stream. Nothing here
//! waits for the GPU.
//!
//! A communicator is one rank, so a launch's rank lists have one element. A [`Launcher`] runs the launches: a GPU
//! (`gpu`), or a recorder in tests.

#[cfg(feature = "cuda")]
mod gpu;
mod switch;
#[cfg(test)]
mod tests;

use std::ffi::c_void;

use semmoe_kernels::Dtype;
use semmoe_kernels_cuda::{self as kernels, Buffer, GpuError, Grid, Launch, LaunchError, MAX_RANKS, Stopped, Team};

use crate::abi::{
    AllReduce, Allgather, Argsort, Combine, DispatchArgs, HasRows, InitArgs, MULTICAST_ALLGATHER,
    MULTICAST_REDUCE_SCATTER, Multicast, ReduceScatter, RowFields,
};
use crate::backend::{Backend, Collectives, Facts};
use crate::failure::{Code, Failure};
use switch::Switch;

#[cfg(feature = "cuda")]
pub(crate) use gpu::{built, open};

/// Maximum number of blocks per rank: enough to saturate its links.
#[cfg(any(test, feature = "cuda"))]
const MAX_BLOCKS: u32 = 64;
/// Minimum number of blocks per rank, for when many ranks share a GPU.
#[cfg(any(test, feature = "cuda"))]
const MIN_BLOCKS: u32 = 8;

/// Returns the number of blocks per rank. It is equal on all ranks, because a group's GPUs are of one kind, and small
/// enough for all ranks to share a GPU, because their blocks wait for one another.
#[cfg(any(test, feature = "cuda"))]
fn blocks_for(processors: u32, world: usize) -> u32 {
    (processors / world as u32).clamp(MIN_BLOCKS, MAX_BLOCKS)
}

/// Runs the checked launches of one rank.
pub trait Launcher: Send {
    /// Enqueues all launches on the stream in order, or none if an error is detected in advance.
    ///
    /// # Errors
    /// The driver's error.
    fn launch(&mut self, launches: &[Launch], stream: *mut c_void) -> Result<(), GpuError>;

    /// Returns the current value of the word to which kernels report.
    fn report(&self) -> u64;

    /// Whether the NVLS kernels can be launched.
    fn has_multicast(&self) -> bool {
        false
    }
}

/// One rank's launcher.
pub struct Opened {
    /// Runs the launches.
    pub launcher: Box<dyn Launcher>,
    /// The word to which the launcher's kernels report.
    pub report: Buffer,
    /// Blocks per rank in a collective; equal on all ranks.
    pub blocks: u32,
}

/// One rank on a GPU.
pub(crate) struct Cuda {
    team: Team,
    /// Each rank's symmetric buffer.
    buffers: [Buffer; MAX_RANKS],
    blocks: u32,
    switch: Switch,
    launcher: Box<dyn Launcher>,
}

impl Cuda {
    /// # Safety
    /// The arguments' arrays must have `world` elements.
    pub(crate) unsafe fn new(args: &InitArgs, facts: &Facts, opened: Opened) -> Result<Self, Failure> {
        let Opened { launcher, report, blocks } = opened;
        let (mut buffers, mut signals) = ([Buffer::default(); MAX_RANKS], [Buffer::default(); MAX_RANKS]);
        for rank in 0..facts.world {
            // SAFETY: upheld by the caller.
            let (buffer, words) = unsafe { (*args.buffers.add(rank), *args.signals.add(rank)) };
            buffers[rank] = Buffer { address: buffer.addr() as u64, bytes: args.buffer_bytes };
            signals[rank] = Buffer { address: words.addr() as u64, bytes: args.signal_bytes };
        }
        let team = Team::new(&signals[..facts.world], facts.rank as u32, &[report], facts.timeout)?;
        Ok(Self { team, buffers, blocks, switch: Switch::default(), launcher })
    }

    /// Returns the same range in every rank's symmetric buffer.
    fn everywhere(&self, offset: u64) -> [Buffer; MAX_RANKS] {
        self.buffers.map(|buffer| buffer.from_offset(offset))
    }

    fn grid(&self) -> Grid {
        Grid::of_blocks(self.blocks)
    }

    fn launch_one(&mut self, launch: Result<Launch, LaunchError>, stream: *mut c_void) -> Result<(), Failure> {
        self.launch(&[launch?], stream)
    }

    fn launch(&mut self, launches: &[Launch], stream: *mut c_void) -> Result<(), Failure> {
        // Fails if this rank has stopped, because the other ranks would wait for it.
        self.check()?;
        let refused = |error: GpuError| Failure::new(Code::Device, error.to_string());
        self.launcher
            .launch(launches, stream)
            .map_err(|sentence| self.check().err().unwrap_or_else(|| refused(sentence)))
    }
}

/// Wraps the caller's own array, with exactly the bytes that a call uses.
fn own<T>(array: *const T, bytes: u64) -> [Buffer; 1] {
    [Buffer { address: array.addr() as u64, bytes }]
}

/// Returns the caller's order of rows; its parts are `None` if null.
fn split(call: RowFields, world: usize) -> kernels::OwnSplit {
    let or_none = |array: *const i32, items: u64| (!array.is_null()).then(|| own(array, items * 4));
    let offsets = or_none(call.offsets, world as u64 + 1);
    kernels::OwnSplit { permutation: or_none(call.permutation, call.tokens), offsets }
}

/// Returns the rows described by checked arguments.
fn rows(args: &impl HasRows) -> kernels::Rows {
    let RowFields { tokens, hidden, dtype, .. } = args.rows();
    kernels::Rows { tokens, hidden, dtype: Dtype::from_code(dtype).unwrap_or(Dtype::F32) }
}

impl Collectives for Cuda {
    fn argsort(&mut self, facts: &Facts, args: &Argsort, stream: *mut c_void) -> Result<(), Failure> {
        let launch = kernels::Argsort {
            destinations: &own(args.destinations, args.n * 4),
            destination_bytes: 4,
            items: args.n,
            ranks: facts.world as u64,
            permutation: &own(args.permutation, args.n * 4),
            inverse: &own(args.inverse, args.n * 4),
            offsets: &own(args.offsets, (facts.world as u64 + 1) * 4),
        }
        .launch(&self.team, Grid { blocks: 1, threads: kernels::SORT_THREADS });
        self.launch_one(launch, stream)
    }

    fn reduce_scatter(&mut self, facts: &Facts, args: &ReduceScatter, stream: *mut c_void) -> Result<(), Failure> {
        let (rows, split) = (rows(args), split(args.rows(), facts.world));
        let (row, has_norm) = (rows.bytes_of(1), !args.norm_weight.is_null());
        let parts = self.everywhere(args.part_offset);
        let out = own(args.out, rows.bytes_of(args.capacity));
        let reduce = kernels::ReduceScatter {
            parts: &parts[..facts.world],
            out: &out,
            order: kernels::RowOrder {
                rows,
                split: split.get(),
                capacity: args.capacity,
                multicast: self.switch.at(MULTICAST_REDUCE_SCATTER, args.part_offset, row).filter(|_| !has_norm),
            },
        };
        let launch = if has_norm {
            kernels::ReduceScatterNorm {
                reduce,
                residual: &own(args.residual, rows.bytes_of(args.tokens)),
                weight: &own(args.norm_weight, row),
                residual_out: &own(args.residual_out, rows.bytes_of(args.capacity)),
                epsilon: args.epsilon,
            }
            .launch(&self.team, self.grid().for_norm())
        } else {
            reduce.launch(&self.team, self.grid())
        };
        self.launch_one(launch, stream)
    }

    fn allgather(&mut self, facts: &Facts, args: &Allgather, stream: *mut c_void) -> Result<(), Failure> {
        let rows = rows(args);
        let launch = kernels::Allgather {
            from: &own(args.rows, rows.bytes_of(args.capacity)),
            out: &self.everywhere(args.out_offset)[..facts.world],
            order: kernels::RowOrder {
                rows,
                split: split(args.rows(), facts.world).get(),
                capacity: args.capacity,
                multicast: self.switch.at(MULTICAST_ALLGATHER, args.out_offset, rows.bytes_of(1)),
            },
        }
        .launch(&self.team, self.grid());
        self.launch_one(launch, stream)
    }

    fn all_reduce(&mut self, facts: &Facts, args: &AllReduce, stream: *mut c_void) -> Result<(), Failure> {
        let launch = kernels::AllReduce {
            parts: &self.everywhere(args.part_offset)[..facts.world],
            out: &self.everywhere(args.out_offset)[..facts.world],
            elements: args.tokens * args.hidden,
            dtype: rows(args).dtype,
        }
        .launch(&self.team, self.grid());
        self.launch_one(launch, stream)
    }

    fn dispatch(&mut self, facts: &Facts, args: &DispatchArgs, stream: *mut c_void) -> Result<(), Failure> {
        let (rows, slots) = (rows(args), args.tokens * u64::from(args.top_k) * 4);
        let launches = kernels::Dispatch {
            tokens: &[args.tokens],
            hidden: args.hidden,
            dtype: rows.dtype,
            top_k: args.top_k.into(),
            experts_in_all: args.experts_total,
            rank_of_expert: Some(&own(args.rank_of_expert, args.experts_total * 4)),
            x: &own(args.x, rows.bytes_of(args.tokens)),
            experts: &own(args.experts, slots),
            weights: &own(args.weights, slots),
            sent_rows: &own(args.sent_rows, args.tokens * facts.world as u64 * 4),
            source_offsets: &own(args.source_offsets, (facts.world as u64 + 1) * 4),
            received: kernels::Received {
                capacity: args.capacity,
                rows: &self.everywhere(args.rows_offset)[..facts.world],
                tokens: &self.everywhere(args.tokens_offset)[..facts.world],
                experts: &self.everywhere(args.experts_offset)[..facts.world],
                weights: &self.everywhere(args.weights_offset)[..facts.world],
            },
        }
        .launches(&self.team, self.grid(), kernels::SORT_THREADS)?;
        self.launch(&launches, stream)
    }

    fn combine(&mut self, facts: &Facts, args: &Combine, stream: *mut c_void) -> Result<(), Failure> {
        let rows = rows(args);
        let launch = kernels::Combine {
            tokens: &[args.tokens],
            hidden: args.hidden,
            dtype: rows.dtype,
            capacity: args.capacity,
            sums: &self.everywhere(args.sums_offset)[..facts.world],
            sent_rows: &own(args.sent_rows, args.tokens * facts.world as u64 * 4),
            out: &own(args.out, rows.bytes_of(args.tokens)),
        }
        .launch(&self.team, self.grid());
        self.launch_one(launch, stream)
    }
}

impl Backend for Cuda {
    fn has_multicast(&self) -> bool {
        self.launcher.has_multicast()
    }

    fn multicast(&mut self, args: &Multicast) -> Result<(), Failure> {
        if !self.launcher.has_multicast() {
            return Err(Failure::new(Code::Device, "the GPU has no multicast support"));
        }
        self.switch = Switch::of(args);
        Ok(())
    }

    /// Reads a word of host memory that a kernel writes before it traps.
    fn check(&mut self) -> Result<(), Failure> {
        Stopped::from_report(self.launcher.report()).map_or(Ok(()), |stopped| Err(stopped.into()))
    }
}

impl From<Stopped> for Failure {
    fn from(stopped: Stopped) -> Self {
        let code = match stopped {
            Stopped::EntryTimeout { .. } | Stopped::ExitTimeout { .. } => Code::TimedOut,
            Stopped::Disagree { .. } => Code::Disagree,
            Stopped::Destination { .. }
            | Stopped::Permutation { .. }
            | Stopped::Offsets { .. }
            | Stopped::Move { .. } => Code::OutOfRange,
            Stopped::Rows { .. } => Code::TooLarge,
            Stopped::Unknown { .. } => Code::Device,
        };
        Self::new(code, stopped.to_string())
    }
}

impl From<LaunchError> for Failure {
    fn from(error: LaunchError) -> Self {
        let code = match error {
            LaunchError::OutOfRange { found, most, .. } if found > most => Code::TooLarge,
            LaunchError::OutOfRange { .. } => Code::OutOfRange,
            LaunchError::Null { .. } => Code::Invalid,
            LaunchError::Misaligned { .. } => Code::Misaligned,
            LaunchError::TooSmall { .. } => Code::TooLarge,
            LaunchError::Count { .. } | LaunchError::Element { .. } => Code::Internal,
        };
        Self::new(code, error.to_string())
    }
}
