//! A GPU stream that implements [`Runner`] and [`Accelerator`].

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::result;
use cudarc::driver::sys::CUstream;

use super::graph::{Graph, Stream};
use super::memory::{DeviceBuffer, HostWords, PeerBuffer};
use super::pinned::{Pinned, Ring};
use super::unit::UnitMemory;
use super::{Device, DeviceError, memory};
use crate::error::GpuError;
use crate::launch::{Grid, Launch};
use crate::repeats::{Repeat, Repeats};
use crate::runner::{Accelerator, Runner};
use crate::team::Buffer;

/// Size of the pinned staging memory, which holds the small writes of many layers, or lets large writes reach bus
/// speed.
const RING_BYTES: usize = 16 << 20;
const READ_BYTES: usize = 4 << 20;
/// Minimum number of launches for which a graph saves time.
const MIN_GRAPH_LAUNCHES: usize = 4;

/// A stream, and the word to which the rank's kernels report.
pub struct DeviceStream {
    stream: CUstream,
    blocks: u32,
    word: HostWords,
    ring: Mutex<Ring>,
    read: Mutex<Pinned>,
    /// Memory that the rank allocated.
    allocated: Mutex<Vec<DeviceBuffer>>,
    /// Mapped memory of other processes.
    imported: Mutex<Vec<PeerBuffer>>,
    /// Set for a rank that does not wait for others: creating a graph may allocate memory, which must not wait for
    /// kernels that wait for this rank.
    graphs: Option<Mutex<Repeats<Graph>>>,
    /// The stream itself, if it is owned.
    own: Option<Stream>,
    /// Memory that the ranks of this GPU share.
    shared: Option<Arc<UnitMemory>>,
    device: Arc<Device>,
}

// SAFETY: any thread that binds the GPU, as every method does, may use stream and memory.
unsafe impl Send for DeviceStream {}
// SAFETY: as above; mutable state is behind locks, and driver calls may come from several threads.
unsafe impl Sync for DeviceStream {}

impl DeviceStream {
    /// Wraps the caller's stream on a GPU, with `blocks` blocks for each collective; all other ranks must use as many.
    ///
    /// # Errors
    /// If the driver refuses the call.
    ///
    /// # Safety
    /// `stream` must belong to the GPU for as long as the value lives.
    pub unsafe fn new(device: Arc<Device>, stream: *mut c_void, blocks: u32) -> Result<Self, DeviceError> {
        device.bind()?;
        Ok(Self {
            stream: stream.cast(),
            blocks,
            word: HostWords::new(1)?,
            ring: Mutex::new(Ring::new(RING_BYTES)?),
            read: Mutex::new(Pinned::new(READ_BYTES)?),
            allocated: Mutex::default(),
            imported: Mutex::default(),
            graphs: None,
            own: None,
            shared: None,
            device,
        })
    }

    /// Creates a new, independent stream for a rank, with `blocks` blocks for each collective.
    ///
    /// # Errors
    /// If the driver refuses the call.
    pub fn of(device: Arc<Device>, blocks: u32) -> Result<Self, DeviceError> {
        device.bind()?;
        let own = Stream::new()?;
        // SAFETY: the value owns the stream.
        let mut new = unsafe { Self::new(device, own.raw().cast(), blocks)? };
        new.own = Some(own);
        Ok(new)
    }

    /// Keeps memory that other ranks access alive as long as this value.
    pub(super) fn sharing(mut self, memory: Arc<UnitMemory>) -> Self {
        self.shared = Some(memory);
        self
    }

    /// Marks this as the stream of a rank that does not wait for others: repeated launches become graphs.
    pub(super) fn alone(mut self) -> Self {
        self.graphs = Some(Mutex::default());
        self
    }

    /// Returns the report word, for the rank's team.
    pub fn word(&self) -> Buffer {
        self.word.buffers()[0]
    }

    fn bound<T>(&self, call: impl FnOnce() -> Result<T, DeviceError>) -> Result<T, GpuError> {
        Ok(self.device.bind().and_then(|()| call())?)
    }
}

/// Locks, ignoring poisoning: a thread that panicked in a call left this stream's memory as it was before or after a
/// copy.
fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Runner for DeviceStream {
    unsafe fn launch(&self, launch: &Launch) -> Result<(), GpuError> {
        // SAFETY: upheld by the caller.
        self.bound(|| unsafe { self.device.launch(launch, self.stream) })
    }

    /// Copies through pinned memory. From other memory, the driver may first wait for the stream, whose kernels may be
    /// waiting for ranks that wait for this one.
    unsafe fn write(&self, bytes: &[u8], to: Buffer) -> Result<(), GpuError> {
        // SAFETY: upheld by the caller.
        self.bound(|| unsafe { locked(&self.ring).copy(bytes, to.address, self.stream) })
    }

    unsafe fn copy(&self, from: Buffer, to: Buffer) -> Result<(), GpuError> {
        // SAFETY: upheld by the caller.
        self.bound(|| unsafe { memory::copy(from, to, to.bytes as usize, self.stream) })
    }

    fn grid(&self) -> Grid {
        Grid::of_blocks(self.blocks)
    }

    fn report(&self) -> u64 {
        self.word.read(0)
    }
}

impl Accelerator for DeviceStream {
    fn allocate(&self, bytes: u64) -> Result<Buffer, GpuError> {
        self.bound(|| {
            let allocated = DeviceBuffer::new(bytes as usize)?;
            let buffer = allocated.buffer();
            locked(&self.allocated).push(allocated);
            Ok(buffer)
        })
    }

    unsafe fn launch_all(&self, launches: &[Launch]) -> Result<(), GpuError> {
        let graphs = self.graphs.as_ref().filter(|_| launches.len() >= MIN_GRAPH_LAUNCHES);
        let (Some(graphs), Some(stream)) = (graphs, &self.own) else {
            // SAFETY: upheld by the caller.
            return launches.iter().try_for_each(|launch| unsafe { self.launch(launch) });
        };
        // SAFETY: upheld by the caller, for as long as the stream owns the memory of its calls.
        self.bound(|| unsafe {
            match locked(graphs).of(launches) {
                Repeat::First => launches.iter().try_for_each(|launch| self.device.launch(launch, self.stream)),
                Repeat::Second(graph) => graph.insert(Graph::of(&self.device, launches, stream)?).launch(stream),
                Repeat::Known(graph) => graph.launch(stream),
            }
        })
    }

    unsafe fn read(&self, from: Buffer, to: &mut [u8]) -> Result<(), GpuError> {
        let mut pinned = locked(&self.read);
        let (mut address, most) = (from.address, pinned.len());
        for part in to.chunks_mut(most) {
            let arrived = pinned.first(part.len());
            self.bound(|| {
                // SAFETY: upheld by the caller; the stream is alive, and passes the copy before the bytes are read.
                unsafe {
                    result::memcpy_dtoh_async(arrived, address, self.stream)?;
                    Ok(result::stream::synchronize(self.stream)?)
                }
            })?;
            part.copy_from_slice(arrived);
            address += part.len() as u64;
        }
        Ok(())
    }

    fn free_bytes(&self) -> Result<u64, GpuError> {
        self.bound(|| Ok(result::mem_get_info()?.0 as u64))
    }

    fn export(&self, memory: Buffer) -> Result<Vec<u8>, GpuError> {
        self.bound(|| Ok(memory::export(memory)?.to_vec()))
    }

    fn import(&self, handle: &[u8], bytes: u64) -> Result<Buffer, GpuError> {
        let Ok(handle) = handle.try_into() else {
            return Err(format!("a memory handle has {} bytes, expected 64", handle.len()).into());
        };
        self.bound(|| {
            let imported = PeerBuffer::open(handle, bytes)?;
            let buffer = imported.buffer();
            locked(&self.imported).push(imported);
            Ok(buffer)
        })
    }
}

impl Drop for DeviceStream {
    /// Waits for the stream, because the GPU uses the memory until then. After a trap, the context and all of its
    /// memory are gone.
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: the stream is alive, as `new` requires.
            let _ = unsafe { result::stream::synchronize(self.stream) };
        }
    }
}
