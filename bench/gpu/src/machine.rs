//! Where kernels run: the shim on the CPU, or a GPU.

use std::time::Instant;

#[cfg(feature = "cuda")]
use semmoe_kernels_cuda::driver::{
    Device,
    graph::{Graph, Stream},
    memory::{DeviceBuffer, Event, copy, synchronize},
};
use semmoe_kernels_cuda::{Buffer, Grid, Launch};
use semmoe_kernels_shim::{Compiler, HostBuffer, Mutant, Shim, Step, StreamEnd};

use crate::options::Options;

/// A machine with memory and kernels.
pub(crate) enum Machine {
    Shim(Shim),
    #[cfg(feature = "cuda")]
    Gpu(Device),
}

/// Memory of a machine.
pub(crate) enum Memory {
    Host(HostBuffer),
    #[cfg(feature = "cuda")]
    Device(DeviceBuffer),
}

impl Memory {
    pub(crate) fn buffer(&self) -> Buffer {
        match self {
            Self::Host(memory) => memory.buffer(),
            #[cfg(feature = "cuda")]
            Self::Device(memory) => memory.buffer(),
        }
    }

    /// Elements it holds.
    pub(crate) fn read<T: bytemuck::Pod>(&self) -> Result<Vec<T>, String> {
        let bytes = match self {
            Self::Host(memory) => memory.bytes().to_vec(),
            #[cfg(feature = "cuda")]
            Self::Device(memory) => memory.read().map_err(text)?,
        };
        Ok(bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect())
    }
}

pub(crate) fn buffers(memory: &[Memory]) -> Vec<Buffer> {
    memory.iter().map(Memory::buffer).collect()
}

pub(crate) fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

pub(crate) fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Fills memory before a kernel writes it: NaN as a float, negative as an index.
pub(crate) const POISON: u8 = 0xff;

/// A small grid for the shim and for sanitizers, which enlarge every block.
fn small_grid(ranks: usize) -> Grid {
    // Every rank needs a thread that polls it.
    Grid { blocks: 2, threads: 2 * (ranks as u32).next_multiple_of(32) }
}

#[cfg(not(feature = "cuda"))]
const NOT_BUILT: &str = "this build has no CUDA: build with --features cuda and SEMMOE_KERNEL_IMAGES, or pass --cpu";

impl Machine {
    pub(crate) fn of(options: &Options) -> Result<Self, String> {
        if options.cpu { Self::shim() } else { Self::gpu() }
    }

    fn shim() -> Result<Self, String> {
        let compiler = Compiler::find().ok_or("the dry run needs a C++ compiler: c++, g++ or clang++")?;
        Shim::build(&compiler).map(Self::Shim).map_err(text)
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn gpu() -> Result<Self, String> {
        let device = Device::open(0).map_err(text)?;
        device.bind().map_err(text)?;
        Ok(Self::Gpu(device))
    }
    #[cfg(not(feature = "cuda"))]
    pub(crate) fn gpu() -> Result<Self, String> {
        Err(NOT_BUILT.to_owned())
    }

    /// Allows for ranks in other processes.
    pub(crate) fn beside_others(&self) {
        match self {
            Self::Shim(shim) => shim.beside_others(),
            // A GPU needs nothing for this.
            #[cfg(feature = "cuda")]
            Self::Gpu(_) => {}
        }
    }

    pub(crate) fn name(&self) -> Result<String, String> {
        match self {
            Self::Shim(_) => Ok("CPU, through the shim".to_owned()),
            #[cfg(feature = "cuda")]
            Self::Gpu(device) => device.name().map_err(text),
        }
    }

    /// Memory with every byte set.
    pub(crate) fn filled(&self, bytes: usize, byte: u8) -> Result<Memory, String> {
        match self {
            Self::Shim(_) => self.holding(&vec![byte; bytes]),
            #[cfg(feature = "cuda")]
            Self::Gpu(_) => DeviceBuffer::filled(bytes, byte).map(Memory::Device).map_err(text),
        }
    }

    pub(crate) fn holding(&self, bytes: &[u8]) -> Result<Memory, String> {
        match self {
            Self::Shim(_) => Ok(Memory::Host(HostBuffer::holding(bytes))),
            #[cfg(feature = "cuda")]
            Self::Gpu(_) => DeviceBuffer::holding(bytes).map(Memory::Device).map_err(text),
        }
    }

    /// For each rank, memory with every byte set.
    pub(crate) fn each(&self, ranks: usize, bytes: usize) -> Result<Vec<Memory>, String> {
        (0..ranks).map(|_| self.filled(bytes, POISON)).collect()
    }

    /// The launch grid for a collective of `ranks` ranks: as many blocks as fit, or a few small ones.
    pub(crate) fn grid(&self, ranks: usize, small: bool) -> Grid {
        match self {
            #[cfg(feature = "cuda")]
            Self::Gpu(device) if !small => {
                Grid::of_blocks((device.processors / ranks as u32).clamp(1, semmoe_kernels_cuda::MAX_BLOCKS))
            }
            _ if small => small_grid(ranks),
            _ => Grid { blocks: 3, ..small_grid(ranks) },
        }
    }

    /// Blocks per rank worth timing.
    pub(crate) fn grids(&self, ranks: usize) -> Vec<Grid> {
        match self {
            Self::Shim(_) => vec![small_grid(ranks)],
            #[cfg(feature = "cuda")]
            Self::Gpu(device) => {
                let one = device.processors / ranks as u32;
                let most = semmoe_kernels_cuda::MAX_BLOCKS;
                [one / 2, one, 2 * one].into_iter().filter(|n| (1..=most).contains(n)).map(Grid::of_blocks).collect()
            }
        }
    }

    /// Whether all blocks of a launch run at once.
    pub(crate) fn fits(&self, launch: &Launch) -> bool {
        match (self, launch) {
            (Self::Shim(_), _) => true,
            #[cfg(feature = "cuda")]
            (Self::Gpu(device), launch) => device.check(launch).is_ok(),
        }
    }

    /// Threads of a block that sorts.
    pub(crate) fn sort_threads(&self) -> u32 {
        match self {
            Self::Shim(_) => 96,
            #[cfg(feature = "cuda")]
            Self::Gpu(_) => semmoe_kernels_cuda::SORT_THREADS,
        }
    }

    /// Runs launches in order. All memory that they use must be alive.
    pub(crate) fn run(&self, launches: &[Launch]) -> Result<(), String> {
        match self {
            Self::Shim(shim) => {
                let steps = launches.iter().map(Step::Launch).collect();
                // SAFETY: the checks keep all memory of a call until they read its results.
                let ends = unsafe { shim.run(&[steps], 1, Mutant::None) }.map_err(text)?;
                if ends.contains(&StreamEnd::Trapped) { Err("a kernel stopped".to_owned()) } else { Ok(()) }
            }
            #[cfg(feature = "cuda")]
            Self::Gpu(device) => {
                for launch in launches {
                    // SAFETY: the default stream is of this device; memory as above.
                    unsafe { device.launch(launch, std::ptr::null_mut()) }.map_err(text)?;
                }
                synchronize().map_err(text)
            }
        }
    }

    /// Prepares launches to be timed together. All memory that they use must stay alive until the last timing.
    pub(crate) fn prepare(&self, launches: Vec<Launch>) -> Result<Prepared, String> {
        match self {
            Self::Shim(_) => Ok(Prepared::Launches(launches)),
            #[cfg(feature = "cuda")]
            Self::Gpu(device) => {
                synchronize().map_err(text)?;
                let stream = Stream::new().map_err(text)?;
                // SAFETY: the callers keep all memory.
                match unsafe { Graph::of(device, &launches, &stream) } {
                    Ok(graph) => Ok(Prepared::Graph(graph, stream)),
                    Err(reason) => Ok(Prepared::Stream(launches, stream, reason.to_string())),
                }
            }
        }
    }

    /// Microseconds of one run of everything prepared.
    pub(crate) fn time(&self, prepared: &Prepared) -> Result<f64, String> {
        match (self, prepared) {
            (_, Prepared::Launches(launches)) => {
                let begun = Instant::now();
                self.run(launches)?;
                Ok(begun.elapsed().as_secs_f64() * 1e6)
            }
            #[cfg(feature = "cuda")]
            (Self::Gpu(device), Prepared::Stream(launches, stream, _)) => between(stream, || {
                // SAFETY: the stream is of the bound device; the callers keep all memory.
                launches.iter().try_for_each(|launch| unsafe { device.launch(launch, stream.raw()) }).map_err(text)
            }),
            #[cfg(feature = "cuda")]
            // SAFETY: as above.
            (_, Prepared::Graph(graph, stream)) => between(stream, || unsafe { graph.launch(stream) }.map_err(text)),
            #[cfg(feature = "cuda")]
            (Self::Shim(_), Prepared::Stream(..)) => Err("the shim does not support streams".to_owned()),
        }
    }

    /// Bytes per microsecond, reads plus writes, of a copy far larger than any cache.
    pub(crate) fn copied(&self) -> Result<f64, String> {
        let bytes: usize = match self {
            Self::Shim(_) => 1 << 20,
            #[cfg(feature = "cuda")]
            Self::Gpu(_) => 1 << 30,
        };
        let (from, to) = (self.filled(bytes, 1)?, self.filled(bytes, 2)?);
        let times: Vec<f64> = (0..20).map(|_| self.copy(from.buffer(), to.buffer())).collect::<Result<_, _>>()?;
        Ok(2.0 * bytes as f64 / median(times))
    }

    fn copy(&self, from: Buffer, to: Buffer) -> Result<f64, String> {
        match self {
            Self::Shim(shim) => {
                let begun = Instant::now();
                // SAFETY: both buffers have these bytes and are not borrowed.
                unsafe { shim.run(&[vec![Step::Copy { from, to }]], 1, Mutant::None) }.map_err(text)?;
                Ok(begun.elapsed().as_secs_f64() * 1e6)
            }
            #[cfg(feature = "cuda")]
            Self::Gpu(_) => {
                let stream = Stream::new().map_err(text)?;
                // SAFETY: both buffers have these bytes and are alive until the event was reached.
                between(&stream, || unsafe { copy(from, to, from.bytes as usize, stream.raw()) }.map_err(text))
            }
        }
    }

    /// Bytes to touch between two runs over the same memory so that caches are cold.
    pub(crate) fn cold_bytes(&self) -> Result<usize, String> {
        match self {
            Self::Shim(_) => Ok(0),
            #[cfg(feature = "cuda")]
            Self::Gpu(device) => device.cache_bytes().map(|bytes| 4 * bytes).map_err(text),
        }
    }
}

/// Microseconds of the work that `launch` enqueues.
#[cfg(feature = "cuda")]
fn between(stream: &Stream, launch: impl FnOnce() -> Result<(), String>) -> Result<f64, String> {
    // SAFETY: the stream is of the bound GPU.
    let begun = unsafe { Event::record(stream.raw()) }.map_err(text)?;
    launch()?;
    // SAFETY: as above.
    let ended = unsafe { Event::record(stream.raw()) }.map_err(text)?;
    ended.microseconds_since(&begun).map_err(text)
}

/// Launches that are timed together.
pub(crate) enum Prepared {
    Launches(Vec<Launch>),
    #[cfg(feature = "cuda")]
    Graph(Graph, Stream),
    /// Launches, their stream, and why there is no graph.
    #[cfg(feature = "cuda")]
    Stream(Vec<Launch>, Stream, String),
}

impl Prepared {
    /// How it is launched, for the report.
    pub(crate) fn how(&self) -> String {
        match self {
            Self::Launches(_) => "the shim has no GPU times".to_owned(),
            #[cfg(feature = "cuda")]
            Self::Graph(..) => "replay of a graph".to_owned(),
            #[cfg(feature = "cuda")]
            Self::Stream(_, _, reason) => format!("separate launches, because graph capture failed: {reason}"),
        }
    }
}
