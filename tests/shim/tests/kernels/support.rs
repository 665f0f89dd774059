//! Ranks, their memory and rounds; random rows.

use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use fastrand::Rng;
use semmoe_kernels::RankOrder;
use semmoe_kernels_cuda::{Buffer, Grid, LaunchError, SIGNAL_BYTES, Stopped, Team};
use semmoe_kernels_shim::{Compiler, HostBuffer, Mutant, Shim, Step, StreamEnd};

/// Environment variable with the kernels built for sanitizers, set if the process runs under those.
pub(crate) const SANITIZED: &str = "SEMMOE_SHIM_SANITIZED";

/// The kernels, built once; `None` without a C++ compiler.
pub(crate) fn shim() -> Option<&'static Shim> {
    static SHIM: OnceLock<Option<Shim>> = OnceLock::new();
    let build = || {
        let Some(compiler) = Compiler::find() else {
            eprintln!("notice: no C++ compiler (c++, g++ or clang++), so the CUDA kernels are not run");
            return None;
        };
        match std::env::var_os(SANITIZED) {
            // SAFETY: the process that started this one compiled it.
            Some(library) => Some(unsafe { Shim::open(Path::new(&library)) }.unwrap()),
            None => Some(Shim::build(&compiler).unwrap()),
        }
    };
    SHIM.get_or_init(build).as_ref()
}

/// Variations of a case's run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) seed: u64,
    pub(crate) mutant: Mutant,
}

impl Run {
    pub(crate) fn of(seed: u64) -> Self {
        Self { seed, mutant: Mutant::None }
    }
}

/// Destinations of tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Spread {
    Random,
    /// All other ranks stay empty.
    AllOn(usize),
    /// No permutation, even parts.
    Plain,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) ranks: usize,
    pub(crate) tokens: usize,
    pub(crate) hidden: usize,
    pub(crate) grid: Grid,
    pub(crate) spread: Spread,
    pub(crate) rounds: usize,
    /// The rank that arrives last in every round.
    pub(crate) held: Option<usize>,
    /// All ranks in one launch, as on a single GPU.
    pub(crate) together: bool,
}

impl Case {
    pub(crate) fn new(ranks: usize, tokens: usize, hidden: usize) -> Self {
        let grid = Grid { blocks: 2, threads: 32 };
        Self { ranks, tokens, hidden, grid, spread: Spread::Random, rounds: 2, held: None, together: false }
    }
}

/// Signals and reports of P ranks.
pub(crate) struct World {
    signals: Vec<HostBuffer>,
    pub(crate) reports: Vec<HostBuffer>,
}

/// In the shim's time, a microsecond is a round without progress.
pub(crate) const TIMEOUT: Duration = Duration::from_micros(200);

impl World {
    pub(crate) fn new(ranks: usize) -> Self {
        let zeroed = |bytes: usize| (0..ranks).map(move |_| HostBuffer::zeroed(bytes)).collect();
        Self { signals: zeroed(SIGNAL_BYTES as usize), reports: zeroed(8) }
    }

    /// The team as seen by one rank's process.
    pub(crate) fn team(&self, rank: usize) -> Result<Team, LaunchError> {
        Team::new(&buffers(&self.signals), rank as u32, &[self.reports[rank].buffer()], TIMEOUT)
    }

    /// The team as seen by a process that runs all ranks.
    pub(crate) fn team_of_all(&self) -> Result<Team, LaunchError> {
        Team::new(&buffers(&self.signals), 0, &buffers(&self.reports), TIMEOUT)
    }

    pub(crate) fn stopped(&self, rank: usize) -> Option<Stopped> {
        Stopped::from_report(bytemuck::pod_read_unaligned(self.reports[rank].bytes()))
    }
}

pub(crate) fn buffers(memory: &[HostBuffer]) -> Vec<Buffer> {
    memory.iter().map(HostBuffer::buffer).collect()
}

pub(crate) fn holding<T: bytemuck::Pod>(values: &[T]) -> HostBuffer {
    HostBuffer::holding(bytemuck::cast_slice(values))
}

pub(crate) fn poisoned<T>(count: usize, elements: usize) -> Vec<HostBuffer> {
    (0..count).map(|_| HostBuffer::poisoned(elements * size_of::<T>())).collect()
}

pub(crate) fn read<T: bytemuck::Pod>(memory: &HostBuffer) -> Vec<T> {
    memory.bytes().chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

pub(crate) fn order(rng: &mut Rng, case: &Case) -> RankOrder {
    let destination = |rng: &mut Rng| match case.spread {
        Spread::AllOn(rank) => rank as u16,
        _ => rng.u16(0..case.ranks as u16),
    };
    let destinations: Vec<u16> = (0..case.tokens).map(|_| destination(rng)).collect();
    semmoe_reference::data::order(&destinations, case.ranks)
}

/// Runs streams that must all succeed.
pub(crate) fn run_all(shim: &Shim, streams: &[Vec<Step<'_>>], run: Run, world: &World) -> Result<(), String> {
    // SAFETY: every buffer outlives this call and is only borrowed after it; signals were zeroed when the world was
    // created.
    let ends = unsafe { shim.run(streams, run.seed, run.mutant) }.map_err(|error| error.to_string())?;
    match ends.iter().position(|&end| end == StreamEnd::Trapped) {
        None => Ok(()),
        Some(stream) => {
            let why = (0..world.reports.len()).filter_map(|rank| world.stopped(rank)).next();
            Err(format!("stream {stream} stopped: {why:?}"))
        }
    }
}

/// The shapes for every collective: odd and even, wide and narrow, more and fewer tokens than ranks, none at all.
pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (index, ranks) in [1, 2, 3, 4, 8].into_iter().enumerate() {
        for (tokens, hidden) in [(13, 24), (5, 7), (0, 8), (3, 264)] {
            cases.push(Case { held: (index % 2 == 0).then_some(ranks - 1), ..Case::new(ranks, tokens, hidden) });
        }
        let threads = 32;
        cases.push(Case { spread: Spread::AllOn(ranks / 2), held: Some(0), ..Case::new(ranks, 9, 16) });
        cases.push(Case { spread: Spread::Plain, ..Case::new(ranks, 10, 8) });
        cases.push(Case { together: true, grid: Grid { blocks: 3, threads }, ..Case::new(ranks, 11, 40) });
    }
    cases
}
