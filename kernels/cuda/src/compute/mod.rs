//! The compute kernels, which process a rank's own rows between two collectives. Each call is checked before it is
//! launched.
//!
//! All memory is on the rank's own GPU. Elements are f32 or bf16, arithmetic is in f32, and bf16 results are rounded
//! once. A row's result does not depend on the other rows of the call, so a token has the same hidden state in any
//! batch. Blocks do not wait for others, so any number of them may be launched, on any number of ranks.

mod argmax;
mod attend;
mod candidates;
mod heads;
mod matmul;
mod params;
mod route;
mod rows;
mod sort_pairs;

use semmoe_kernels::Dtype;

pub use argmax::Argmax;
pub use attend::Attend;
pub use candidates::{CandidateAsk, CandidateRow, Candidates};
pub use heads::{
    HeadNorms, HeadRows, MAX_HEAD_ELEMENTS, PAGE_TOKENS, PagedHeads, ProjectedHeads, RotaryAngles, RotaryLayout,
};
pub use matmul::{Activation, MatMul, MatMulRows, TILE_ROWS, Tile, Variant, tiles};
pub use route::{GroupLimit, GroupScore, MAX_CHOSEN, MAX_EXPERTS, MAX_GROUPS, Route, Scoring};
pub use rows::{AddRows, Embed, Norm, SumPairs};
pub use sort_pairs::{Pairs, SortPairs, Tiles};

use crate::error::LaunchError;
use crate::launch::{Grid, Launch};
use crate::params::{LaunchParams, Params};
use crate::team::{Buffer, fill, in_range};

/// Maximum number of blocks along x and along y.
const MAX_GRID: [u64; 2] = [(1 << 31) - 1, 65_535];

/// Creates a launch of independent blocks. A count of 0 along an axis becomes 1, and that block has no work.
pub(crate) fn apart<P: Params>(
    kernel: &'static str,
    blocks: [u64; 2],
    threads: u32,
    params: &P,
) -> Result<Launch, LaunchError> {
    let x = in_range("blocks along x", blocks[0].max(1), 1, MAX_GRID[0])?;
    let y = in_range("blocks along y", blocks[1].max(1), 1, MAX_GRID[1])?;
    let grid = Grid { blocks: x, threads };
    Ok(Launch { kernel, grid, ranks: y, is_collective: false, params: LaunchParams::of(params) })
}

/// Returns the kernel for this element type.
pub(crate) fn of_type(
    what: &'static str,
    dtype: Dtype,
    kernels: [&'static str; 2],
) -> Result<&'static str, LaunchError> {
    match dtype {
        Dtype::F32 => Ok(kernels[0]),
        Dtype::Bf16 => Ok(kernels[1]),
        Dtype::F16 => Err(LaunchError::Element { what, found: dtype }),
    }
}

/// Returns a buffer's address, after checking that it has enough bytes.
pub(crate) fn address(what: &'static str, buffer: Buffer, bytes: u64, alignment: u64) -> Result<u64, LaunchError> {
    let mut address = [0];
    fill(what, &mut address, &[buffer], bytes, alignment)?;
    Ok(address[0])
}

/// Returns an optional buffer's address, after checking that it has enough bytes; null without a buffer.
pub(crate) fn address_or_null(
    what: &'static str,
    buffer: Option<Buffer>,
    bytes: u64,
    alignment: u64,
) -> Result<u64, LaunchError> {
    buffer.map_or(Ok(0), |buffer| address(what, buffer, bytes, alignment))
}

/// Returns the product of the counts, saturated if it does not fit in 64 bits.
pub(crate) fn bytes_of(counts: &[u64]) -> u64 {
    counts.iter().fold(1, |product: u64, &count| product.saturating_mul(count))
}
