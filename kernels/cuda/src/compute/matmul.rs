//! Matrix products for projections, experts and the head.

use semmoe_kernels::Dtype;

use super::params::MatMulParams;
use super::{address, address_or_null, apart, bytes_of, of_type};
use crate::calls::ELEMENT_ALIGNMENT;
use crate::error::LaunchError;
use crate::launch::Launch;
use crate::team::{Buffer, in_range};

/// Maximum number of rows per tile (`MATMUL_TILE_ROWS`).
pub const TILE_ROWS: u32 = 64;
/// Threads per block (`MATMUL_THREADS`).
const THREADS: u32 = 256;
/// The variant for many rows is used only for tiles with more rows than this, and with enough blocks to fill a GPU.
const MANY_LEAST_ROWS: u64 = 32;
const MANY_LEAST_BLOCKS: u64 = 128;

/// Kernel variants with bitwise equal results.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Variant {
    /// For decode, which is bound by reading the weights.
    FewRows,
    /// For prefill: weights and rows go through shared memory.
    ManyRows,
}

impl Variant {
    /// Returns the weight rows per block (`MATMUL_FEATURES`, `MANY_WEIGHTS`).
    fn features(self) -> u64 {
        match self {
            Self::FewRows => 16,
            Self::ManyRows => 128,
        }
    }

    /// Returns the tensor core kernel for tiles of up to `most` rows.
    fn kernel(self, most: u64) -> &'static str {
        match (self, most) {
            (Self::ManyRows, _) => "semmoe_matmul_bf16_many",
            (Self::FewRows, 0..=8) => "semmoe_matmul_bf16_8",
            (Self::FewRows, 9..=16) => "semmoe_matmul_bf16_16",
            (Self::FewRows, _) => "semmoe_matmul_bf16_64",
        }
    }
}

/// Rows of one group, which share the group's weights (`MatMulTile`): twelve bytes on the GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Tile {
    /// The group.
    pub group: u32,
    /// The first row of `out`.
    pub first: u32,
    /// Number of rows, at most [`TILE_ROWS`]; may be 0.
    pub rows: u32,
}

/// Size of a tile.
pub(crate) const TILE_BYTES: u64 = size_of::<Tile>() as u64;

/// Returns the tiles of groups whose rows are contiguous, given the number of rows in each group.
pub fn tiles(counts: impl IntoIterator<Item = u32>) -> Vec<Tile> {
    let mut tiles = Vec::new();
    let mut first = 0;
    for (group, mut left) in (0..).zip(counts) {
        while left > 0 {
            let rows = left.min(TILE_ROWS);
            tiles.push(Tile { group, first, rows });
            (first, left) = (first + rows, left - rows);
        }
    }
    tiles
}

/// The assignment of rows to weights.
#[derive(Clone, Copy, Debug)]
pub enum MatMulRows {
    /// All rows use the same weights, those of a single group.
    Dense {
        /// Rows of `out`.
        rows: u64,
    },
    /// Rows are assigned to groups, such as the experts of a layer.
    Grouped {
        /// `[count]` [`Tile`], built by the host. A kernel traps if a tile exceeds the rows or groups.
        tiles: Buffer,
        /// Tiles.
        count: u64,
        /// Number of rows of the largest tile.
        most: u64,
        /// Number of weight groups.
        groups: u64,
        /// Rows of `out`, including rows in no tile.
        rows: u64,
    },
}

/// The function applied to the sums.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activation {
    /// Outputs the sums.
    None,
    /// `silu(gate) * up`: a group then has twice as many weight rows, gate before up.
    SiluProduct,
}

/// Computes `out[i] = x[row_of[i]] W^T`, with f32 sums for either element type.
///
/// K = inputs, N = outputs, G = groups. If K and the stride of x are multiples of 16 bytes, rows must be aligned to 16
/// bytes; otherwise, they are read element by element.
#[derive(Clone, Copy, Debug)]
pub struct MatMul {
    /// Rows of `x_stride` elements, of which the first K are used; the number of rows follows from the buffer's size.
    pub x: Buffer,
    /// `[G, N, K]`, as in checkpoints; for [`Activation::SiluProduct`] `[G, 2 N, K]`.
    pub weights: Buffer,
    /// `[rows, N]`
    pub out: Buffer,
    /// `[N]` f32, added to the sums. Only allowed for a dense product without activation.
    pub bias: Option<Buffer>,
    /// K
    pub inputs: u64,
    /// N: the width of `out`.
    pub outputs: u64,
    /// Elements from the start of one row of x to the next, at least K.
    pub x_stride: u64,
    /// Element type of x, weights and out: f32 or bf16.
    pub dtype: Dtype,
    /// Whether outputs are f32 regardless of `dtype`.
    pub out_f32: bool,
    /// The rows of `out` and their weights.
    pub rows: MatMulRows,
    /// `[rows]` u32, the row of x for each row of `out`; `None` for the same index. A kernel traps if a row exceeds x.
    pub row_of: Option<Buffer>,
    /// The function applied to the sums.
    pub activation: Activation,
}

impl MatMul {
    fn rows_and_groups(&self) -> (u64, u64) {
        match self.rows {
            MatMulRows::Dense { rows } => (rows, 1),
            MatMulRows::Grouped { rows, groups, .. } => (rows, groups),
        }
    }

    /// Returns the number of weight rows per output.
    fn fold(&self) -> u64 {
        if self.activation == Activation::SiluProduct { 2 } else { 1 }
    }

    fn grouped(&self) -> bool {
        matches!(self.rows, MatMulRows::Grouped { .. })
    }

    /// Whether rows consist of whole vectors.
    fn vectors(&self) -> bool {
        let whole = |elements: u64| (elements * self.dtype.bytes() as u64).is_multiple_of(ELEMENT_ALIGNMENT);
        whole(self.inputs) && whole(self.x_stride)
    }

    fn params(&self) -> Result<MatMulParams, LaunchError> {
        let (rows, groups) = self.rows_and_groups();
        let bytes = self.dtype.bytes() as u64;
        let out_bytes = if self.out_f32 { 4 } else { bytes };
        let alignment = if self.vectors() { ELEMENT_ALIGNMENT } else { bytes };
        let x_rows = x_rows(self.x.bytes / bytes, self.inputs, self.x_stride);
        // The last row does not need a full stride.
        let x_bytes = match self.row_of {
            None if rows > 0 => bytes_of(&[rows - 1, self.x_stride, bytes]).saturating_add(self.inputs * bytes),
            _ => 0,
        };
        let bias_most = u64::from(!self.grouped() && self.activation == Activation::None);
        in_range("number of biases with groups or an activation", u64::from(self.bias.is_some()), 0, bias_most)?;
        let (tiles, tile_count) = self.tiles()?;
        let weights = bytes_of(&[groups, self.outputs, self.fold(), self.inputs, bytes]);
        Ok(MatMulParams {
            x: address("x", self.x, x_bytes, alignment)?,
            weights: address("weights", self.weights, weights, alignment)?,
            out: address("out", self.out, bytes_of(&[rows, self.outputs, out_bytes]), out_bytes)?,
            bias: address_or_null("bias", self.bias, bytes_of(&[self.outputs, 4]), 4)?,
            row_of: address_or_null("row of", self.row_of, bytes_of(&[rows, 4]), 4)?,
            tiles,
            inputs: in_range("inputs", self.inputs, 1, 1 << 20)?,
            outputs: in_range("outputs", self.outputs, 1, i32::MAX as u64 / 2)?,
            x_stride: in_range("stride of x", self.x_stride, self.inputs, i32::MAX as u64)?,
            x_rows: x_rows.min(u64::from(u32::MAX)) as u32,
            rows: in_range("rows", rows, 0, i32::MAX as u64)?,
            tile_count,
            groups: in_range("groups", groups, 1, i32::MAX as u64)?,
            flags: u32::from(self.out_f32) | (self.fold() as u32 - 1) << 1 | u32::from(self.grouped()) << 2,
        })
    }

    /// Returns the address and number of the tiles; 0 for a dense product.
    fn tiles(&self) -> Result<(u64, u32), LaunchError> {
        match self.rows {
            MatMulRows::Dense { .. } => Ok((0, 0)),
            MatMulRows::Grouped { tiles, count, most, .. } => {
                in_range("rows of the largest tile", most, 0, u64::from(TILE_ROWS))?;
                let address = address("tiles", tiles, bytes_of(&[count, TILE_BYTES]), 4)?;
                Ok((address, in_range("tiles", count, 0, 65_535)?))
            }
        }
    }

    /// Returns the number of tiles, and the rows of the largest.
    fn tile_shape(&self) -> [u64; 2] {
        match self.rows {
            MatMulRows::Dense { rows } => [rows.div_ceil(u64::from(TILE_ROWS)), rows],
            MatMulRows::Grouped { count, most, .. } => [count, most],
        }
    }

    /// Returns the variant that is likely faster.
    pub fn variant(&self) -> Variant {
        let [tiles, most] = self.tile_shape();
        let blocks = (self.outputs * self.fold()).div_ceil(Variant::ManyRows.features()) * tiles;
        match most > MANY_LEAST_ROWS && blocks >= MANY_LEAST_BLOCKS {
            true => Variant::ManyRows,
            false => Variant::FewRows,
        }
    }

    /// # Errors
    /// See [`LaunchError`].
    pub fn launch(&self) -> Result<Launch, LaunchError> {
        self.launch_as(self.variant())
    }

    /// Launches the given variant; all variants produce equal outputs.
    ///
    /// # Errors
    /// See [`LaunchError`].
    pub fn launch_as(&self, variant: Variant) -> Result<Launch, LaunchError> {
        let params = self.params()?;
        let [tiles, most] = self.tile_shape();
        // Only tensor core kernels have variants.
        let tensor = self.vectors() && self.dtype == Dtype::Bf16;
        let variant = if tensor { variant } else { Variant::FewRows };
        let kernels = match self.vectors() {
            true => ["semmoe_matmul_f32", variant.kernel(most)],
            false => ["semmoe_matmul_any_f32", "semmoe_matmul_any_bf16"],
        };
        let kernel = of_type("matrix product", self.dtype, kernels)?;
        apart(kernel, [(self.outputs * self.fold()).div_ceil(variant.features()), tiles], THREADS, &params)
    }
}

/// Returns the number of rows that fit in `elements`.
fn x_rows(elements: u64, inputs: u64, stride: u64) -> u64 {
    if elements < inputs { 0 } else { (elements - inputs) / stride.max(1) + 1 }
}
