//! Launches: a kernel, its grid and its parameters, checked.

use crate::error::LaunchError;
use crate::params::{COLLECTIVE_THREADS, LaunchParams, MAX_BLOCKS, NORM_THREADS, SORT_THREADS, WARP};
use crate::team::{Team, in_range};

/// Blocks and threads of a collective. All ranks must use the same number of blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grid {
    /// Blocks of each rank, 1 to 256. All blocks of all ranks on one GPU must fit on it at once, because they wait for
    /// one another.
    pub blocks: u32,
    /// Threads of each block: a multiple of 32, and no fewer than there are ranks.
    pub threads: u32,
}

impl Grid {
    /// Blocks with the maximum number of threads.
    pub fn of_blocks(blocks: u32) -> Self {
        Self { blocks, threads: COLLECTIVE_THREADS }
    }

    /// The grid for the fused norm: as many threads, in blocks of its own size.
    #[must_use]
    pub fn for_norm(self) -> Self {
        let blocks = self.blocks.saturating_mul(self.threads) / NORM_THREADS;
        Self { blocks: blocks.clamp(1, MAX_BLOCKS), threads: NORM_THREADS }
    }

    /// Launch sizes for a collective of these ranks.
    pub(crate) fn check(self, team: &Team) -> Result<Self, LaunchError> {
        in_range("blocks", u64::from(self.blocks), 1, u64::from(MAX_BLOCKS))?;
        let ranks = team.ranks() as u32;
        let (least, most) = (ranks.next_multiple_of(WARP), COLLECTIVE_THREADS);
        in_range("threads", u64::from(self.threads), u64::from(least), u64::from(most))?;
        whole_warps(self.threads)?;
        Ok(self)
    }

    /// The fused norm has a fixed block size.
    pub(crate) fn check_norm(self, team: &Team) -> Result<Self, LaunchError> {
        in_range("threads", u64::from(self.threads), u64::from(NORM_THREADS), u64::from(NORM_THREADS))?;
        self.check(team)
    }

    /// A single block of whole warps, for kernels without ranks that wait for one another.
    pub(crate) fn check_sort(self) -> Result<Self, LaunchError> {
        in_range("blocks", u64::from(self.blocks), 1, 1)?;
        in_range("threads", u64::from(self.threads), u64::from(WARP), u64::from(SORT_THREADS))?;
        whole_warps(self.threads)?;
        Ok(self)
    }
}

fn whole_warps(threads: u32) -> Result<(), LaunchError> {
    in_range("threads after the last whole warp", u64::from(threads % WARP), 0, 0)?;
    Ok(())
}

/// A checked launch.
#[derive(Clone, Copy)]
pub struct Launch {
    pub(crate) kernel: &'static str,
    pub(crate) grid: Grid,
    pub(crate) ranks: u32,
    pub(crate) is_collective: bool,
    pub(crate) params: LaunchParams,
}

impl Launch {
    /// The kernel's name.
    pub fn kernel(&self) -> &'static str {
        self.kernel
    }

    /// `gridDim.x` (for a collective: blocks of each rank), `gridDim.y` (ranks in the launch), threads of each block.
    pub fn shape(&self) -> (u32, u32, u32) {
        (self.grid.blocks, self.ranks, self.grid.threads)
    }

    /// Whether its blocks wait for other blocks, so that all of them must run at once. Compute kernels do not wait, and
    /// a rank may launch them at any time.
    pub fn is_collective(&self) -> bool {
        self.is_collective
    }

    /// The kernel's one argument.
    pub fn params(&self) -> &[u8] {
        self.params.as_bytes()
    }
}

impl std::fmt::Debug for Launch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (x, y, threads) = self.shape();
        write!(f, "{}<<<({x}, {y}), {threads}>>>", self.kernel)
    }
}
