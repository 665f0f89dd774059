//! The calls and their operands, checked before any launch. `tests/reference` defines their semantics.
//!
//! P = ranks, L = ranks of the launch, n = tokens, H = width of a row, k = experts per token, N = experts. A list of L
//! buffers is in the launch's rank order, a list of P buffers in the team's. Elements are aligned to 16 bytes, other
//! arrays to 4.

use semmoe_kernels::Dtype;

use crate::error::LaunchError;
use crate::launch::{Grid, Launch};
use crate::params::{
    AllReduceParams, ArgsortParams, GatherParams, LaunchParams, MAX_NORM_HIDDEN, MAX_RANKS, NormParams, OrderParams,
    Params, ReduceParams, ShuffleParams,
};
use crate::team::{Buffer, Team, fill, in_range};

/// Alignment of element pointers and of offsets into symmetric memory.
pub const ELEMENT_ALIGNMENT: u64 = 16;

/// Rows of one width.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rows {
    /// n
    pub tokens: u64,
    /// H
    pub hidden: u64,
    /// Element type.
    pub dtype: Dtype,
}

impl Rows {
    /// Returns the size of `rows` rows of this width.
    pub fn bytes_of(&self, rows: u64) -> u64 {
        rows.saturating_mul(self.hidden).saturating_mul(self.dtype.bytes() as u64)
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> u64 {
        self.bytes_of(self.tokens)
    }

    /// Returns the alignment of rows that kernels only read; rows that are not whole vectors are read element by
    /// element.
    fn alignment(&self) -> u64 {
        match self.bytes_of(1) % ELEMENT_ALIGNMENT {
            0 => ELEMENT_ALIGNMENT,
            _ => self.dtype.bytes() as u64,
        }
    }

    /// Checks that the number of tokens and the width are in the kernels' 32-bit range.
    pub(crate) fn check(&self) -> Result<(u32, u32), LaunchError> {
        // Row x vector counts then stay far below 64 bits; positions outside the kernels are signed.
        let tokens = in_range("tokens", self.tokens, 0, i32::MAX as u64)?;
        Ok((tokens, in_range("hidden", self.hidden, 1, 1 << 20)?))
    }
}

/// The rows of each rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct Split<'a> {
    /// L x `[n]`; `None` for the tokens' own order, a plain collective.
    pub permutation: Option<&'a [Buffer]>,
    /// L x `[P + 1]`; `None` for even parts.
    pub offsets: Option<&'a [Buffer]>,
}

/// The split of a launch that runs one rank.
#[derive(Clone, Copy, Debug)]
pub struct OwnSplit {
    /// `[n]`; `None` for the tokens' own order.
    pub permutation: Option<[Buffer; 1]>,
    /// `[P + 1]`; `None` for even parts.
    pub offsets: Option<[Buffer; 1]>,
}

impl OwnSplit {
    /// Returns the split in the form that calls take.
    pub fn get(&self) -> Split<'_> {
        let [permutation, offsets] = [&self.permutation, &self.offsets].map(|list| list.as_ref().map(|list| &list[..]));
        Split { permutation, offsets }
    }
}

/// The rows of a reduce-scatter or allgather, their destinations, and the capacity there.
#[derive(Clone, Copy, Debug)]
pub struct RowOrder<'a> {
    /// Rows of all tokens.
    pub rows: Rows,
    /// The rows of each rank.
    pub split: Split<'a>,
    /// Capacity of each buffer with one rank's rows.
    pub capacity: u64,
    /// The multicast address of the buffers with all rows. With it, the NVLink switch adds in its own order.
    pub multicast: Option<Buffer>,
}

impl RowOrder<'_> {
    /// Returns the size of one rank's rows at capacity.
    fn part_bytes(&self) -> u64 {
        self.rows.bytes_of(self.capacity)
    }

    fn params(&self, team: &Team) -> Result<OrderParams, LaunchError> {
        let (tokens, hidden) = self.rows.check()?;
        Ok(OrderParams {
            permutation: team.locals_or_null("permutation", self.split.permutation, self.rows.tokens * 4)?,
            offsets: team.locals_or_null("offsets", self.split.offsets, (team.ranks() as u64 + 1) * 4)?,
            multicast: multicast(self.multicast, &self.rows)?,
            tokens,
            hidden,
            capacity: in_range("capacity", self.capacity, 0, i32::MAX as u64)?,
            padding: 0,
        })
    }
}

/// Reduce-scatter, shuffled if the split is.
#[derive(Clone, Copy, Debug)]
pub struct ReduceScatter<'a> {
    /// P x `[n, H]`
    pub parts: &'a [Buffer],
    /// L x `[capacity, H]`
    pub out: &'a [Buffer],
    /// Order in which the parts are written to `out`.
    pub order: RowOrder<'a>,
}

impl ReduceScatter<'_> {
    fn params(&self, team: &Team) -> Result<ReduceParams, LaunchError> {
        let order = self.order.params(team)?;
        let rows = &self.order.rows;
        Ok(ReduceParams {
            team: team.params(),
            parts: team.peers("part", self.parts, rows.bytes(), rows.alignment())?,
            out: team.locals("out", self.out, self.order.part_bytes(), ELEMENT_ALIGNMENT)?,
            order,
        })
    }

    /// # Errors
    /// See [`LaunchError`].
    pub fn launch(&self, team: &Team, grid: Grid) -> Result<Launch, LaunchError> {
        let params = self.params(team)?;
        let kernels = match self.order.multicast {
            None => ["semmoe_srs_f32", "semmoe_srs_f16", "semmoe_srs_bf16"],
            Some(_) => ["semmoe_srs_nvls_f32", "semmoe_srs_nvls_f16", "semmoe_srs_nvls_bf16"],
        };
        collective(by_type(self.order.rows.dtype, kernels), team, grid.check(team)?, &params)
    }
}

/// Checks a multicast address, which represents the same bytes as the buffers. Its rows must be whole vectors.
fn multicast(buffer: Option<Buffer>, rows: &Rows) -> Result<u64, LaunchError> {
    let Some(buffer) = buffer else { return Ok(0) };
    let mut address = [0];
    fill("multicast", &mut address, &[buffer], rows.bytes(), ELEMENT_ALIGNMENT)?;
    let odd = rows.bytes_of(1) % ELEMENT_ALIGNMENT;
    in_range("row size modulo 16 with multicast", odd, 0, 0)?;
    Ok(address[0])
}

/// Reduce-scatter with the layer's residual and RMSNorm.
#[derive(Clone, Copy, Debug)]
pub struct ReduceScatterNorm<'a> {
    /// The reduction; its `out` receives the normed rows.
    pub reduce: ReduceScatter<'a>,
    /// L x `[n, H]`, in token order.
    pub residual: &'a [Buffer],
    /// L x `[H]`
    pub weight: &'a [Buffer],
    /// L x `[capacity, H]`: sum + residual.
    pub residual_out: &'a [Buffer],
    /// Added to the mean of squares.
    pub epsilon: f32,
}

impl ReduceScatterNorm<'_> {
    /// # Errors
    /// See [`LaunchError`].
    pub fn launch(&self, team: &Team, grid: Grid) -> Result<Launch, LaunchError> {
        let rows = &self.reduce.order.rows;
        in_range("hidden", rows.hidden, 1, u64::from(MAX_NORM_HIDDEN))?;
        let out_bytes = self.reduce.order.part_bytes();
        let params = NormParams {
            reduce: self.reduce.params(team)?,
            residual: team.locals("residual", self.residual, rows.bytes(), rows.alignment())?,
            weight: team.locals("norm weight", self.weight, rows.bytes_of(1), ELEMENT_ALIGNMENT)?,
            residual_out: team.locals("residual out", self.residual_out, out_bytes, ELEMENT_ALIGNMENT)?,
            epsilon: self.epsilon,
            padding: 0,
        };
        let kernel = by_type(rows.dtype, ["semmoe_srs_norm_f32", "semmoe_srs_norm_f16", "semmoe_srs_norm_bf16"]);
        collective(kernel, team, grid.check_norm(team)?, &params)
    }
}

/// Allgather, shuffled if the split is: the exact inverse of [`ReduceScatter`]'s placement.
#[derive(Clone, Copy, Debug)]
pub struct Allgather<'a> {
    /// L x `[capacity, H]`
    pub from: &'a [Buffer],
    /// P x `[n, H]`
    pub out: &'a [Buffer],
    /// Order in which `out` receives the rows of `from`.
    pub order: RowOrder<'a>,
}

impl Allgather<'_> {
    /// # Errors
    /// See [`LaunchError`].
    pub fn launch(&self, team: &Team, grid: Grid) -> Result<Launch, LaunchError> {
        let order = self.order.params(team)?;
        let rows = &self.order.rows;
        let params = GatherParams {
            team: team.params(),
            rows: team.locals("rows", self.from, self.order.part_bytes(), ELEMENT_ALIGNMENT)?,
            out: team.peers("out", self.out, rows.bytes(), ELEMENT_ALIGNMENT)?,
            order,
        };
        let kernel = match (rows.dtype.bytes(), self.order.multicast.is_some()) {
            (4, false) => "semmoe_sag_4",
            (_, false) => "semmoe_sag_2",
            (4, true) => "semmoe_sag_nvls_4",
            (_, true) => "semmoe_sag_nvls_2",
        };
        collective(kernel, team, grid.check(team)?, &params)
    }
}

/// All-reduce; a part may be the same buffer as its rank's `out`.
#[derive(Clone, Copy, Debug)]
pub struct AllReduce<'a> {
    /// P x `[elements]`
    pub parts: &'a [Buffer],
    /// P x `[elements]`
    pub out: &'a [Buffer],
    /// Elements of each part.
    pub elements: u64,
    /// Element type.
    pub dtype: Dtype,
}

impl AllReduce<'_> {
    /// # Errors
    /// See [`LaunchError`].
    pub fn launch(&self, team: &Team, grid: Grid) -> Result<Launch, LaunchError> {
        let bytes = self.elements.saturating_mul(self.dtype.bytes() as u64);
        let params = AllReduceParams {
            team: team.params(),
            parts: team.peers("part", self.parts, bytes, ELEMENT_ALIGNMENT)?,
            out: team.peers("out", self.out, bytes, ELEMENT_ALIGNMENT)?,
            elements: self.elements,
        };
        let kernel = by_type(self.dtype, ["semmoe_all_reduce_f32", "semmoe_all_reduce_f16", "semmoe_all_reduce_bf16"]);
        collective(kernel, team, grid.check(team)?, &params)
    }
}

/// Sorts items by destination, stably.
#[derive(Clone, Copy, Debug)]
pub struct Argsort<'a> {
    /// L x `[n]`, each below `ranks`.
    pub destinations: &'a [Buffer],
    /// Bytes per destination: 2 or 4.
    pub destination_bytes: u64,
    /// n
    pub items: u64,
    /// Number of destinations.
    pub ranks: u64,
    /// L x `[n]`
    pub permutation: &'a [Buffer],
    /// L x `[n]`
    pub inverse: &'a [Buffer],
    /// L x `[ranks + 1]`
    pub offsets: &'a [Buffer],
}

impl Argsort<'_> {
    /// # Errors
    /// See [`LaunchError`].
    pub fn launch(&self, team: &Team, grid: Grid) -> Result<Launch, LaunchError> {
        let items = in_range("items", self.items, 0, i32::MAX as u64)?;
        let ranks = in_range("destinations", self.ranks, 1, MAX_RANKS as u64)?;
        let key = self.destination_bytes;
        let kernel = match key {
            2 => "semmoe_argsort_u16",
            4 => "semmoe_argsort_u32",
            found => return Err(LaunchError::OutOfRange { what: "bytes of a destination", found, least: 2, most: 4 }),
        };
        let params = ArgsortParams {
            destinations: team.locals("destinations", self.destinations, self.items * key, key)?,
            permutation: team.locals("permutation", self.permutation, self.items * 4, 4)?,
            inverse: team.locals("inverse", self.inverse, self.items * 4, 4)?,
            offsets: team.locals("offsets", self.offsets, (self.ranks + 1) * 4, 4)?,
            report: team.params().report,
            items,
            ranks,
        };
        collective(kernel, team, grid.check_sort()?, &params)
    }
}

/// Gathers rows by a permutation, or scatters them back, within each rank's memory.
#[derive(Clone, Copy, Debug)]
pub struct Shuffle<'a> {
    /// L x `[n, H]`
    pub from: &'a [Buffer],
    /// L x `[n, H]`
    pub to: &'a [Buffer],
    /// L x `[n]`
    pub permutation: &'a [Buffer],
    /// The rows moved.
    pub rows: Rows,
    /// Whether to scatter, `to[permutation[i]] = from[i]`, instead of gathering, `to[i] = from[permutation[i]]`.
    pub back: bool,
}

impl Shuffle<'_> {
    /// # Errors
    /// See [`LaunchError`].
    pub fn launch(&self, team: &Team, grid: Grid) -> Result<Launch, LaunchError> {
        let (rows, hidden) = self.rows.check()?;
        let params = ShuffleParams {
            from: team.locals("from", self.from, self.rows.bytes(), ELEMENT_ALIGNMENT)?,
            to: team.locals("to", self.to, self.rows.bytes(), ELEMENT_ALIGNMENT)?,
            permutation: team.locals("permutation", self.permutation, self.rows.tokens * 4, 4)?,
            report: team.params().report,
            rows,
            hidden,
            back: u32::from(self.back),
            padding: 0,
        };
        let kernel = if self.rows.dtype.bytes() == 4 { "semmoe_shuffle_4" } else { "semmoe_shuffle_2" };
        collective(kernel, team, grid.check(team)?, &params)
    }
}

pub(crate) fn by_type(dtype: Dtype, [f32, f16, bf16]: [&'static str; 3]) -> &'static str {
    match dtype {
        Dtype::F32 => f32,
        Dtype::F16 => f16,
        Dtype::Bf16 => bf16,
    }
}

pub(crate) fn collective<P: Params>(
    kernel: &'static str,
    team: &Team,
    grid: Grid,
    params: &P,
) -> Result<Launch, LaunchError> {
    Ok(Launch { kernel, grid, ranks: team.local() as u32, is_collective: true, params: LaunchParams::of(params) })
}
