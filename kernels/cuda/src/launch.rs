//! Checked launches: a kernel, its grid and its parameters.

use crate::error::LaunchError;
use crate::params::{COLLECTIVE_THREADS, LaunchParams, MAX_BLOCKS, NORM_THREADS, SORT_THREADS, WARP};
use crate::team::{Team, in_range};

/// Blocks and threads of a collective. All ranks must use the same number of blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grid {
    /// Blocks per rank, 1 to 256. All blocks of all ranks on one GPU must be resident at once, because they wait for
    /// one another.
    pub blocks: u32,
    /// Threads per block: a multiple of 32, and at least the number of ranks.
    pub threads: u32,
}

impl Grid {
    /// Returns a grid of `blocks` blocks with the maximum number of threads.
    pub fn of_blocks(blocks: u32) -> Self {
        Self { blocks, threads: COLLECTIVE_THREADS }
    }

    /// Returns the grid for the fused norm: as many threads, in blocks of the norm's own size.
    #[must_use]
    pub fn for_norm(self) -> Self {
        let blocks = self.blocks.saturating_mul(self.threads) / NORM_THREADS;
        Self { blocks: blocks.clamp(1, MAX_BLOCKS), threads: NORM_THREADS }
    }

    /// Checks the launch sizes for a collective of these ranks.
    pub(crate) fn check(self, team: &Team) -> Result<Self, LaunchError> {
        in_range("blocks", u64::from(self.blocks), 1, u64::from(MAX_BLOCKS))?;
        let ranks = team.ranks() as u32;
        let (least, most) = (ranks.next_multiple_of(WARP), COLLECTIVE_THREADS);
        in_range("threads", u64::from(self.threads), u64::from(least), u64::from(most))?;
        whole_warps(self.threads)?;
        Ok(self)
    }

    /// Checks the launch sizes for the fused norm, which has a fixed block size.
    pub(crate) fn check_norm(self, team: &Team) -> Result<Self, LaunchError> {
        in_range("threads", u64::from(self.threads), u64::from(NORM_THREADS), u64::from(NORM_THREADS))?;
        self.check(team)
    }

    /// Checks for a single block of whole warps, as required by kernels whose ranks do not wait for one another.
    pub(crate) fn check_sort(self) -> Result<Self, LaunchError> {
        in_range("blocks", u64::from(self.blocks), 1, 1)?;
        in_range("threads", u64::from(self.threads), u64::from(WARP), u64::from(SORT_THREADS))?;
        whole_warps(self.threads)?;
        Ok(self)
    }
}

fn whole_warps(threads: u32) -> Result<(), LaunchError> {
    in_range("threads modulo the warp size", u64::from(threads % WARP), 0, 0)?;
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

    /// Returns `gridDim.x` (for a collective: blocks per rank), `gridDim.y` (ranks in the launch), and threads per
    /// block.
    pub fn shape(&self) -> (u32, u32, u32) {
        (self.grid.blocks, self.ranks, self.grid.threads)
    }

    /// Whether the launch's blocks wait for other blocks, so that all of them must run at once. Compute kernels do not
    /// wait, and a rank may launch them at any time.
    pub fn is_collective(&self) -> bool {
        self.is_collective
    }

    /// Returns the kernel's only argument.
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
