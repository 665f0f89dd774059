//! Ranks of a unit in a process of their own: other processes map the memory of their shim.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use semmoe_kernels::Dtype;
use semmoe_kernels_cuda::unit::{LocalRank, Room};
use semmoe_kernels_cuda::{Accelerator, Buffer, GpuError, Grid, Launch, Runner, SIGNAL_BYTES};
use semmoe_kernels_shim::{Group, HostBuffer, Shim, ShimStream};
use semmoe_ranks::BufferAddress;
use semmoe_tables::Attention;
use semmoe_worker::{DeviceChoice, EngineLimits, GpuProvider, KvBudget, WorkerConfig};
use serde::{Deserialize, Serialize};

/// Content of fresh memory, as that of `HostBuffer`.
const POISON: u8 = 0xff;

/// The ranks of a process and their settings: its one argument, in JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ProcessStart {
    /// The kernels, built by another process.
    pub kernels: PathBuf,
    /// A checkpoint.
    pub model: PathBuf,
    /// The first rank of the process.
    pub rank: u16,
    /// Number of ranks of the unit.
    pub world: u16,
    /// Number of ranks of the process.
    pub here: u16,
    /// Layouts of attention, the initial one first.
    pub attention: Vec<Attention>,
    /// Rank 0's address.
    pub rendezvous: std::net::SocketAddr,
    /// Ranks with different places count as ranks of several hosts.
    pub place: Option<String>,
    /// The process allocates GPU memory after its first collective.
    pub allocates_late: bool,
}

impl ProcessStart {
    /// The configuration of the process's ranks.
    pub fn config(self, shim: &'static Shim) -> WorkerConfig {
        let mut config = WorkerConfig::new(self.model, self.rank, self.world, self.rendezvous);
        config.listen = (self.rank == 0).then_some(([127, 0, 0, 1], 0).into());
        config.device = DeviceChoice::Cuda { dtype: Dtype::F32, ranks_here: self.here };
        config.gpu = Some(Arc::new(ProcessGpu::new(shim, self.here.into(), self.allocates_late)));
        (config.attention, config.both_attentions) = (self.attention[0], self.attention.len() > 1);
        config.place = self.place;
        config.exit_on_stdin_eof = true;
        config.exit_after_loss = Some(Duration::from_secs(1));
        config.limits =
            EngineLimits { running: 4, step_tokens: 64, kv: KvBudget::Tokens(1024), ..EngineLimits::default() };
        config
    }
}

/// Memory in a file without a name: of this process, or of another one.
struct Mapping {
    map: MmapRaw,
    /// Kept open for other processes; of this process alone.
    file: Option<File>,
}

impl Mapping {
    fn new(bytes: u64, content: u8) -> Result<Self, GpuError> {
        let file = memfd_create("gpu", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, bytes.max(1))?;
        let file = File::from(file);
        let map = MmapOptions::new().len(bytes.max(1) as usize).map_raw(&file)?;
        // SAFETY: the whole map, which nothing else knows yet.
        unsafe { map.as_mut_ptr().write_bytes(content, map.len()) };
        Ok(Self { map, file: Some(file) })
    }

    fn open(handle: &[u8], bytes: u64) -> Result<Self, GpuError> {
        let numbers = std::str::from_utf8(handle)?.split_once(' ').ok_or("a handle has no two numbers")?;
        let file = BufferAddress { pid: numbers.0.parse()?, fd: numbers.1.parse()? }.open()?;
        let (found, expected) = (file.metadata()?.len(), bytes.max(1));
        if found != expected {
            return Err(format!("memory of another process has {found} bytes, expected {expected}").into());
        }
        Ok(Self { map: MmapOptions::new().len(expected as usize).map_raw(&file)?, file: None })
    }

    fn buffer(&self, bytes: u64) -> Buffer {
        Buffer { address: self.map.as_ptr() as u64, bytes }
    }

    fn handle(&self) -> Option<Vec<u8>> {
        let file = self.file.as_ref()?;
        Some(format!("{} {}", std::process::id(), file.as_raw_fd()).into_bytes())
    }
}

/// Memory that the ranks of a process allocated or mapped.
#[derive(Default)]
struct Mappings(Mutex<Vec<Mapping>>);

impl Mappings {
    fn lock(&self) -> MutexGuard<'_, Vec<Mapping>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&self, mapping: Mapping, bytes: u64) -> Buffer {
        let buffer = mapping.buffer(bytes);
        self.lock().push(mapping);
        buffer
    }

    fn allocate(&self, bytes: u64, content: u8) -> Result<Buffer, GpuError> {
        Ok(self.keep(Mapping::new(bytes, content)?, bytes))
    }
}

/// The shim as the GPU of a process.
struct ProcessGpu {
    shim: &'static Shim,
    group: Arc<Group<Launch>>,
    memory: Arc<Mappings>,
    allocates_late: bool,
}

impl ProcessGpu {
    fn new(shim: &'static Shim, here: usize, allocates_late: bool) -> Self {
        shim.beside_others();
        Self { shim, group: ShimStream::group(shim, here), memory: Arc::default(), allocates_late }
    }
}

impl GpuProvider for ProcessGpu {
    fn free_bytes(&self) -> Result<u64, GpuError> {
        Ok(1 << 30)
    }

    fn rank(&self, rank: usize, room: Room) -> Result<LocalRank, GpuError> {
        let report = Arc::new(HostBuffer::zeroed(8));
        let stream = ShimStream::new(self.shim, rank, Some(Arc::clone(&self.group)), Arc::clone(&report));
        let (memory, allocates_late) = (Arc::clone(&self.memory), self.allocates_late);
        Ok(LocalRank {
            gpu: format!("shim of {}", std::process::id()),
            report: report.buffer(),
            timeout: Duration::from_secs(20),
            signals: memory.allocate(SIGNAL_BYTES, 0)?,
            symmetric: memory.allocate(room.symmetric_bytes(), POISON)?,
            own: memory.allocate(room.own_bytes(), POISON)?,
            runner: Arc::new(ProcessStream { stream, memory, has_met: AtomicBool::new(false), allocates_late }),
        })
    }
}

/// A rank's stream, with memory that other processes map.
struct ProcessStream {
    stream: ShimStream,
    memory: Arc<Mappings>,
    /// Whether the rank has begun a collective.
    has_met: AtomicBool,
    allocates_late: bool,
}

impl Runner for ProcessStream {
    unsafe fn launch(&self, launch: &Launch) -> Result<(), GpuError> {
        if launch.is_collective() && self.has_met.swap(true, Ordering::Relaxed) && self.allocates_late {
            self.allocate(1)?;
        }
        // SAFETY: the caller guarantees it.
        unsafe { self.stream.launch(launch) }
    }

    unsafe fn write(&self, bytes: &[u8], to: Buffer) -> Result<(), GpuError> {
        // SAFETY: the caller guarantees it.
        unsafe { self.stream.write(bytes, to) }
    }

    unsafe fn copy(&self, from: Buffer, to: Buffer) -> Result<(), GpuError> {
        // SAFETY: the caller guarantees it.
        unsafe { self.stream.copy(from, to) }
    }

    fn grid(&self) -> Grid {
        self.stream.grid()
    }

    fn report(&self) -> u64 {
        self.stream.report()
    }
}

impl Accelerator for ProcessStream {
    /// Refused once the rank has begun a collective, whose kernel may be waiting for another rank.
    fn allocate(&self, bytes: u64) -> Result<Buffer, GpuError> {
        match self.has_met.load(Ordering::Relaxed) {
            true => Err(format!("{bytes} bytes were allocated after the first collective").into()),
            false => self.memory.allocate(bytes, POISON),
        }
    }

    unsafe fn read(&self, from: Buffer, to: &mut [u8]) -> Result<(), GpuError> {
        // SAFETY: the caller guarantees it.
        unsafe { self.stream.read(from, to) }
    }

    fn free_bytes(&self) -> Result<u64, GpuError> {
        self.stream.free_bytes()
    }

    fn export(&self, memory: Buffer) -> Result<Vec<u8>, GpuError> {
        let mappings = self.memory.lock();
        let of = mappings.iter().find(|mapping| mapping.map.as_ptr() as u64 == memory.address);
        of.and_then(Mapping::handle).ok_or_else(|| "memory that this process did not allocate".into())
    }

    fn import(&self, handle: &[u8], bytes: u64) -> Result<Buffer, GpuError> {
        Ok(self.memory.keep(Mapping::open(handle, bytes)?, bytes))
    }
}
