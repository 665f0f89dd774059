//! Causal attention over KV cache pages.

use semmoe_kernels::Dtype;

use super::heads::{CheckedHeads, PAGE_TOKENS, PagedHeads};
use super::params::AttendParams;
use super::rows::MAX_ROWS;
use super::{address, apart, bytes_of, of_type};
use crate::error::LaunchError;
use crate::launch::Launch;
use crate::team::{Buffer, in_range};

/// Keys per split (`SPLIT_KEYS`).
const SPLIT_KEYS: u64 = 4 * PAGE_TOKENS;
/// Threads per block that processes splits (`ATTEND_THREADS`), and per block that merges partial results
/// (`MERGE_THREADS`).
const ATTEND_THREADS: u32 = 128;
const MERGE_THREADS: u32 = 128;
/// Maximum number of rows for which each block processes only one split; more rows yield enough blocks without that.
const ROWS_WITH_SPLITS: u64 = 128;
/// Maximum number of queries that a block processes at once, with and without tensor cores.
const TENSOR_QUERIES: u64 = 32;
const PLAIN_QUERIES: u64 = 8;

impl PagedHeads {
    /// Returns the number of partial results stored per row.
    fn slots(rows: u64, longest: u64) -> u64 {
        if rows <= ROWS_WITH_SPLITS { longest / SPLIT_KEYS + 1 } else { 1 }
    }

    /// Returns the bytes of the values and of the totals of this many partial results.
    fn part_bytes(&self, parts: u64) -> [u64; 2] {
        [bytes_of(&[parts, self.query_width(), 4]), bytes_of(&[parts, self.kv_heads, self.group, 8])]
    }

    /// Returns the scratch size that suffices for every [`Attend`] with at most this many rows whose positions are at
    /// most `longest`.
    pub fn scratch_bytes(&self, rows: u64, longest: u64) -> u64 {
        let few = rows.min(ROWS_WITH_SPLITS);
        let parts = rows.max(few.saturating_mul(Self::slots(few, longest)));
        let [values, totals] = self.part_bytes(parts);
        values.saturating_add(totals)
    }

    /// Whether the products use tensor cores.
    fn has_tensor_products(&self) -> bool {
        self.dtype == Dtype::Bf16 && self.dim.is_multiple_of(8)
    }
}

/// Computes the attention of each row's query heads over its sequence's keys, up to the row's own position.
#[derive(Clone, Copy, Debug)]
pub struct Attend {
    /// Heads and pages.
    pub heads: PagedHeads,
    /// Factor applied to the scores.
    pub scale: f32,
    /// `[rows, kv_heads, group, dim]`
    pub queries: Buffer,
    /// `[rows]` u32: the last key visible to a row
    pub positions: Buffer,
    /// `[rows]` u32: each row's index in the page table. Adjacent rows of a sequence share the reads of its keys.
    pub sequence_of: Buffer,
    /// `[sequences, table_width]` u32. A page outside the pool results in rows of NaN.
    pub page_table: Buffer,
    /// Number of rows in the table.
    pub sequences: u64,
    /// Pages of the longest sequence.
    pub table_width: u64,
    /// Maximum position; rows with larger positions become NaN.
    pub longest: u64,
    /// [`PagedHeads::scratch_bytes`]
    pub scratch: Buffer,
    /// `[rows, kv_heads, group, dim]`
    pub out: Buffer,
    /// Rows.
    pub rows: u64,
}

impl Attend {
    /// Returns the rows per block, and the kernel. In prompts, adjacent rows belong to one sequence and share reads.
    fn shape(&self) -> Result<(u64, &'static str), LaunchError> {
        let most = if self.heads.has_tensor_products() { TENSOR_QUERIES } else { PLAIN_QUERIES };
        let shares = self.rows > self.sequences.saturating_mul(2);
        let rows = if shares { (most / self.heads.group).max(1) } else { 1 };
        let plain = of_type("attention", self.heads.dtype, ["semmoe_attend_f32", "semmoe_attend_bf16"])?;
        let kernel = match rows * self.heads.group {
            _ if !self.heads.has_tensor_products() => plain,
            0..=8 => "semmoe_attend_bf16_8",
            9..=16 => "semmoe_attend_bf16_16",
            _ => "semmoe_attend_bf16_32",
        };
        Ok((rows, kernel))
    }

    fn params(&self, heads: CheckedHeads, rows_of_block: u64) -> Result<AttendParams, LaunchError> {
        let of_rows = bytes_of(&[self.rows, 4]);
        let most = self.table_width.saturating_mul(PAGE_TOKENS).saturating_sub(1);
        let longest = in_range("longest position", self.longest, 0, most)?;
        let slots = PagedHeads::slots(self.rows, self.longest);
        let [values, totals] = self.heads.part_bytes(bytes_of(&[self.rows, slots]));
        let scratch = address("scratch", self.scratch, values.saturating_add(totals), 16)?;
        Ok(AttendParams {
            queries: self.heads.queries("queries", self.queries, self.rows)?,
            pool: heads.pool,
            positions: address("positions", self.positions, of_rows, 4)?,
            sequence_of: address("sequences of rows", self.sequence_of, of_rows, 4)?,
            page_table: address("page table", self.page_table, bytes_of(&[self.sequences, self.table_width, 4]), 4)?,
            values: scratch,
            totals: scratch + values,
            out: self.heads.queries("out", self.out, self.rows)?,
            page_elements: heads.page_elements,
            layer_begins: heads.layer_begins,
            rows: in_range("rows", self.rows, 0, MAX_ROWS)?,
            kv_heads: heads.kv_heads,
            group: heads.group,
            dim: heads.dim,
            pages: heads.pages,
            sequences: in_range("sequences", self.sequences, 0, u64::from(u32::MAX) - 1)?,
            table_width: in_range("pages of a sequence", self.table_width, 1, 1 << 24)?,
            slots: in_range("splits", slots, 1, u64::from(u32::MAX))?,
            rows_of_block: in_range("rows of a block", rows_of_block, 1, MAX_ROWS)?,
            longest,
            scale: self.scale * std::f32::consts::LOG2_E,
            padding: 0,
        })
    }

    /// Returns two launches: one computes partial results, the other merges them.
    ///
    /// # Errors
    /// See [`LaunchError`].
    pub fn launch(&self) -> Result<[Launch; 2], LaunchError> {
        let heads = self.heads.check()?;
        let (rows_of_block, kernel) = self.shape()?;
        let params = self.params(heads, rows_of_block)?;
        let merge = ["semmoe_attend_merge_f32", "semmoe_attend_merge_bf16"];
        let merge = of_type("attention", self.heads.dtype, merge)?;
        let blocks = bytes_of(&[self.rows.div_ceil(rows_of_block), self.heads.kv_heads]);
        let values = self.heads.query_width().div_ceil(u64::from(MERGE_THREADS));
        Ok([
            apart(kernel, [blocks, params.slots.into()], ATTEND_THREADS, &params)?,
            apart(merge, [values, self.rows], MERGE_THREADS, &params)?,
        ])
    }
}
