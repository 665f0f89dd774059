//! Ranks of the worker whose GPUs are the shim.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "tests")]

mod process;
mod watched;

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use half::bf16;
use semmoe_kernels::Dtype;
use semmoe_kernels::collectives::{Lockstep, PrivateMemory, RowCollectives, UnitLink};
use semmoe_kernels_cuda::unit::{LocalRank, Room, UnitRank};
use semmoe_kernels_cuda::{Accelerator, Buffer, Launch, SIGNAL_BYTES};
use semmoe_kernels_shim::{Compiler, Group, HostBuffer, Shim, ShimStream};
use semmoe_tables::{Attention, ExpertCopies, RankId, Tables};
use semmoe_worker::ep::{ExpertLayout, ExpertParallel, LocalTransport, WireRows};
use semmoe_worker::model::gpu::GpuSettings;
use semmoe_worker::model::{AttentionPlan, Model, ModelConfig, ModelError};

pub use process::ProcessStart;
pub use watched::Watched;

/// How long a rank waits for another inside a kernel: far above any test's need.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A rank of a unit.
pub struct Rank {
    /// Its part of the model.
    pub model: Model,
    /// Its connection to the unit.
    pub ep: ExpertParallel,
}

/// The layout of a unit, and its element type.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Number of ranks.
    pub world: usize,
    /// dp or tp.
    pub attention: Attention,
    /// Whole experts or slices.
    pub experts: ExpertLayout,
    /// Element type of weights, rows, keys and values.
    pub dtype: Dtype,
    /// Whether attention may switch; if so, the number of pages in the other layout.
    pub other_pages: Option<usize>,
    /// With attention tp, the tables that shuffle rows.
    pub tables: Option<Arc<Tables>>,
}

impl Layout {
    /// A unit of `world` ranks.
    pub fn new(world: usize, attention: Attention, experts: ExpertLayout, dtype: Dtype) -> Self {
        Self { world, attention, experts, dtype, other_pages: None, tables: None }
    }
}

/// The kernels, built once; `None` without a C++ compiler.
pub fn shim() -> Option<&'static Shim> {
    static SHIM: OnceLock<Option<Shim>> = OnceLock::new();
    let build = || {
        let compiler = Compiler::find();
        if compiler.is_none() {
            eprintln!("notice: no C++ compiler (c++, g++ or clang++), so the CUDA kernels are not run");
        }
        compiler.map(|compiler| Shim::build(&compiler).unwrap())
    };
    SHIM.get_or_init(build).as_ref()
}

/// The memory that the ranks of a unit share, all on the shim.
pub struct ShimUnit {
    shim: &'static Shim,
    group: Arc<Group<Launch>>,
    /// `[P]` each.
    signals: Vec<Arc<HostBuffer>>,
    reports: Vec<Arc<HostBuffer>>,
    symmetric: Vec<Arc<HostBuffer>>,
    own: Vec<Arc<HostBuffer>>,
}

impl ShimUnit {
    /// Memory for the ranks of `room`.
    pub fn new(shim: &'static Shim, room: Room) -> Self {
        let zeroed = |bytes: u64| (0..room.ranks).map(|_| Arc::new(HostBuffer::zeroed(bytes as usize))).collect();
        let poisoned = |bytes: u64| (0..room.ranks).map(|_| Arc::new(HostBuffer::poisoned(bytes as usize))).collect();
        Self {
            shim,
            group: ShimStream::group(shim, room.ranks),
            signals: zeroed(SIGNAL_BYTES),
            reports: zeroed(8),
            symmetric: poisoned(room.symmetric_bytes()),
            own: poisoned(room.own_bytes()),
        }
    }

    /// A rank whose GPU has unlimited memory.
    pub fn rank(&self, rank: usize) -> UnitRank {
        self.rank_with(rank, |stream| stream)
    }

    /// A rank with a modified stream, before it knows the others' memory.
    pub fn local_with<A: Accelerator + Sync + 'static>(
        &self,
        rank: usize,
        change: impl FnOnce(ShimStream) -> A,
    ) -> LocalRank {
        let report = &self.reports[rank];
        let stream = ShimStream::new(self.shim, rank, Some(Arc::clone(&self.group)), Arc::clone(report));
        stream.keep([&self.signals, &self.symmetric, &self.own].into_iter().flatten().cloned());
        let [signals, symmetric, own] = [&self.signals, &self.symmetric, &self.own].map(|of| of[rank].buffer());
        let (gpu, report, timeout) = ("shim".to_owned(), report.buffer(), TIMEOUT);
        LocalRank { runner: Arc::new(change(stream)), gpu, report, timeout, signals, symmetric, own }
    }

    /// A rank with a modified stream.
    pub fn rank_with<A: Accelerator + Sync + 'static>(
        &self,
        rank: usize,
        change: impl FnOnce(ShimStream) -> A,
    ) -> UnitRank {
        let buffers = |of: &[Arc<HostBuffer>]| of.iter().map(|memory| memory.buffer()).collect::<Vec<Buffer>>();
        self.local_with(rank, change).join(rank, &buffers(&self.signals), buffers(&self.symmetric)).unwrap()
    }
}

/// Loads the only rank of a unit on a GPU with `memory` bytes; `None` without a C++ compiler.
pub fn loaded_alone(dir: &Path, placement: &ExpertCopies, memory: u64) -> Option<Result<Model, ModelError>> {
    let settings = GpuSettings { dtype: Dtype::F32, step_tokens: 64, running: 4, pages: 8, other_pages: 0 };
    let unit = ShimUnit::new(shim()?, settings.room(1, &ModelConfig::load(dir).unwrap()));
    let link = UnitLink::join(Box::new(LocalTransport::mesh(1).remove(0)) as Box<dyn Lockstep>, 1).unwrap();
    let gpu = unit.rank_with(0, |stream| stream.limited(memory));
    Some(Model::load_on(dir, placement.clone(), ExpertLayout::Ep, Attention::Dp, settings, gpu, link))
}

/// Pages of keys and values per rank.
pub const PAGES: usize = 40;

/// Runs `work` on every rank of a unit, each on a thread; `None` without a C++ compiler.
pub fn on_gpus<R: Send>(
    dir: &Path,
    placement: &ExpertCopies,
    layout: &Layout,
    work: impl Fn(Rank) -> R + Sync,
) -> Option<Vec<R>> {
    on_streams(dir, placement, layout, |_, stream| stream, work)
}

/// Runs `work` on every rank of a unit, each on the stream that `change` returns.
pub fn on_streams<R: Send, A: Accelerator + Sync + 'static>(
    dir: &Path,
    placement: &ExpertCopies,
    layout: &Layout,
    change: impl Fn(usize, ShimStream) -> A + Sync,
    work: impl Fn(Rank) -> R + Sync,
) -> Option<Vec<R>> {
    let &Layout { world, attention, experts, dtype, other_pages, ref tables } = layout;
    let (both, other_pages) = (other_pages.is_some(), other_pages.unwrap_or(0));
    let settings = GpuSettings { dtype, step_tokens: 400, running: 16, pages: PAGES, other_pages };
    let unit = ShimUnit::new(shim()?, settings.room(world, &ModelConfig::load(dir).unwrap()));
    Some(on_ranks(world, |link| {
        let link = UnitLink::join(Box::new(link) as Box<dyn Lockstep>, 1).unwrap();
        let rank = link.rank();
        let rows = match dtype {
            Dtype::Bf16 => {
                WireRows::bf16(Box::new(RowCollectives::new(link.clone(), PrivateMemory::<bf16>::new(rank))))
            }
            _ => WireRows::f32(Box::new(RowCollectives::new(link.clone(), PrivateMemory::<f32>::new(rank)))),
        };
        let ep = ExpertParallel::over(rows, placement.clone(), experts).unwrap();
        let gpu = unit.rank_with(rank, |stream| change(rank, stream));
        let plan = AttentionPlan { both, tables: tables.clone(), ..attention.into() };
        let model = Model::load_on(dir, placement.clone(), experts, plan, settings, gpu, link).unwrap();
        work(Rank { model, ep })
    }))
}

/// Runs `work` on every rank of a unit on the CPU, in f32.
pub fn on_cpus<R: Send>(
    dir: &Path,
    placement: &ExpertCopies,
    layout: &Layout,
    work: impl Fn(Rank) -> R + Sync,
) -> Vec<R> {
    let &Layout { world, attention, experts, other_pages, ref tables, .. } = layout;
    on_ranks(world, |link| {
        let rank = link.rank();
        let plan = AttentionPlan { both: other_pages.is_some(), tables: tables.clone(), ..attention.into() };
        let id = RankId::new(rank as u16);
        let model = Model::load_divided(dir, id, placement.clone(), experts, plan).unwrap();
        let rows = WireRows::f32(Box::new(RowCollectives::new(link, PrivateMemory::new(rank))));
        work(Rank { model, ep: ExpertParallel::over(rows, placement.clone(), experts).unwrap() })
    })
}

fn on_ranks<R: Send>(world: usize, work: impl Fn(LocalTransport) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> =
            LocalTransport::mesh(world).into_iter().map(|link| scope.spawn(move || work(link))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
