//! Signals and reports of ranks that share a machine; random rows.

use std::time::Duration;

use fastrand::Rng;
use semmoe_kernels::{Element, RankOrder};
#[cfg(feature = "cuda")]
use semmoe_kernels_cuda::driver::memory::HostWords;
use semmoe_kernels_cuda::{Buffer, SIGNAL_BYTES, Stopped, Team};

use crate::machine::{Machine, Memory, buffers, text};

/// P ranks of one launch.
pub(crate) struct World {
    _signals: Vec<Memory>,
    reports: Reports,
    pub(crate) team: Team,
}

/// One word per rank, readable by the host after a trap.
pub(crate) enum Reports {
    Host(Vec<Memory>),
    #[cfg(feature = "cuda")]
    Words(HostWords),
}

impl Reports {
    pub(crate) fn new(machine: &Machine, ranks: usize) -> Result<Self, String> {
        match machine {
            Machine::Shim(_) => (0..ranks).map(|_| machine.filled(8, 0)).collect::<Result<_, _>>().map(Self::Host),
            #[cfg(feature = "cuda")]
            Machine::Gpu(_) => HostWords::new(ranks).map(Self::Words).map_err(text),
        }
    }

    pub(crate) fn buffers(&self) -> Vec<Buffer> {
        match self {
            Self::Host(memory) => buffers(memory),
            #[cfg(feature = "cuda")]
            Self::Words(words) => words.buffers(),
        }
    }

    /// Adds to a run's error the reason that the kernel reported, if any.
    pub(crate) fn explain(&self, error: String) -> String {
        let codes: Vec<u64> = match self {
            Self::Host(memory) => memory.iter().filter_map(|word| word.read::<u64>().ok()).flatten().collect(),
            #[cfg(feature = "cuda")]
            Self::Words(words) => (0..words.buffers().len()).map(|word| words.read(word)).collect(),
        };
        let stopped = codes.into_iter().find_map(Stopped::from_report);
        stopped.map_or(error.clone(), |stopped| format!("{error}: {stopped}"))
    }
}

impl World {
    pub(crate) fn new(machine: &Machine, ranks: usize) -> Result<Self, String> {
        let signals: Vec<Memory> =
            (0..ranks).map(|_| machine.filled(SIGNAL_BYTES as usize, 0)).collect::<Result<_, _>>()?;
        let reports = Reports::new(machine, ranks)?;
        let team = Team::new(&buffers(&signals), 0, &reports.buffers(), Duration::from_secs(10)).map_err(text)?;
        Ok(Self { _signals: signals, reports, team })
    }

    /// Adds to a run's error the reason that the kernel reported, if any.
    pub(crate) fn explain(&self, error: String) -> String {
        self.reports.explain(error)
    }
}

pub(crate) fn elements<T: Element>(rng: &mut Rng, count: usize) -> Vec<T> {
    (0..count).map(|_| T::round((rng.f32() - 0.5) * 8.0)).collect()
}

/// A random order of tokens by rank.
pub(crate) fn order(rng: &mut Rng, tokens: usize, ranks: usize) -> RankOrder {
    let destinations: Vec<u16> = (0..tokens).map(|_| rng.u16(0..ranks as u16)).collect();
    semmoe_reference::data::order(&destinations, ranks)
}
