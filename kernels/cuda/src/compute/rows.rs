//! Operations on whole rows: embedding, norm, addition, and returning the experts' rows to their tokens.

use semmoe_kernels::Dtype;

use super::params::{AddRowsParams, EmbedParams, RowNormParams, SumPairsParams};
use super::{address, address_or_null, apart, bytes_of, of_type};
use crate::calls::ELEMENT_ALIGNMENT;
use crate::error::LaunchError;
use crate::launch::Launch;
use crate::params::Params;
use crate::team::{Buffer, in_range};

/// Maximum number of rows in a call that maps rows to blocks along y.
pub(crate) const MAX_ROWS: u64 = 65_535;
/// Maximum number of threads per block that processes part of a row (`ROW_THREADS`), and per block that norms a row
/// (`ROW_NORM_THREADS`).
const ROW_THREADS: u64 = 256;
const ROW_NORM_THREADS: u64 = 512;

/// The width of rows, which determines the unit of access.
#[derive(Clone, Copy)]
struct Width {
    hidden: u64,
    dtype: Dtype,
}

impl Width {
    fn bytes(self, rows: u64) -> u64 {
        bytes_of(&[rows, self.hidden, self.dtype.bytes() as u64])
    }

    fn is_whole(self) -> bool {
        self.bytes(1).is_multiple_of(ELEMENT_ALIGNMENT)
    }

    /// Returns the alignment of rows; rows that are not whole vectors are read element by element.
    fn alignment(self) -> u64 {
        if self.is_whole() { ELEMENT_ALIGNMENT } else { self.dtype.bytes() as u64 }
    }

    /// Returns the alignment of an f32 row with as many elements.
    fn alignment_of_floats(self) -> u64 {
        if self.is_whole() { ELEMENT_ALIGNMENT } else { 4 }
    }

    fn check(self) -> Result<u32, LaunchError> {
        in_range("hidden", self.hidden, 1, 1 << 20)
    }

    /// Returns the number of threads for one row, a multiple of 32.
    fn threads(self, most: u64) -> u32 {
        let units = if self.is_whole() { self.bytes(1) / ELEMENT_ALIGNMENT } else { self.hidden };
        // Rounding never exceeds `most`.
        units.next_multiple_of(32).min(most) as u32
    }

    fn rows(self, what: &'static str, buffer: Buffer, rows: u64) -> Result<u64, LaunchError> {
        address(what, buffer, self.bytes(rows), self.alignment())
    }

    /// Launches one thread per access of each row.
    fn launch<P: Params>(self, kernel: &'static str, rows: u32, params: &P) -> Result<Launch, LaunchError> {
        let threads = self.threads(ROW_THREADS);
        let accesses = if self.is_whole() { self.bytes(1) / ELEMENT_ALIGNMENT } else { self.hidden };
        apart(kernel, [accesses.div_ceil(threads.into()), rows.into()], threads, params)
    }
}

fn rows_in_range(rows: u64) -> Result<u32, LaunchError> {
    in_range("rows", rows, 0, MAX_ROWS)
}

/// Looks up the rows of a table by token; a token outside the table gets a row of NaN.
#[derive(Clone, Copy, Debug)]
pub struct Embed {
    /// `[vocab, hidden]`
    pub table: Buffer,
    /// `[rows]` u32
    pub tokens: Buffer,
    /// `[rows, hidden]`
    pub out: Buffer,
    /// Tokens.
    pub rows: u64,
    /// Elements per row.
    pub hidden: u64,
    /// Number of rows in the table.
    pub vocab: u64,
    /// Element type of table and rows.
    pub dtype: Dtype,
}

impl Embed {
    /// # Errors
    /// See [`LaunchError`].
    pub fn launch(&self) -> Result<Launch, LaunchError> {
        let kernel = of_type("an embedding", self.dtype, ["semmoe_embed_f32", "semmoe_embed_bf16"])?;
        let width = Width { hidden: self.hidden, dtype: self.dtype };
        let params = EmbedParams {
            table: width.rows("table", self.table, self.vocab)?,
            tokens: address("tokens", self.tokens, bytes_of(&[self.rows, 4]), 4)?,
            out: width.rows("out", self.out, self.rows)?,
            rows: rows_in_range(self.rows)?,
            hidden: width.check()?,
            vocab: in_range("vocabulary", self.vocab, 1, u64::from(u32::MAX))?,
            padding: 0,
        };
        width.launch(kernel, params.rows, &params)
    }
}

/// Computes the residual's sum and its RMSNorm: `residual += added` if there is an `added`, then `out = x /
/// sqrt(mean(x^2) + epsilon) * weight`, where x is the residual as stored.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// `[any, hidden]`, with at least the rows read
    pub residual: Buffer,
    /// `[rows, hidden]`
    pub added: Option<Buffer>,
    /// `[rows]` u32: the residual's rows to norm, only allowed without `added`; `None` for the first ones. A row
    /// outside the residual results in NaN.
    pub row_of: Option<Buffer>,
    /// `[hidden]` f32
    pub weight: Buffer,
    /// `[rows, hidden]`
    pub out: Buffer,
    /// Rows of `out`.
    pub rows: u64,
    /// Elements per row.
    pub hidden: u64,
    /// Added to the mean of squares.
    pub epsilon: f32,
    /// Element type of the rows.
    pub dtype: Dtype,
}

impl Norm {
    /// # Errors
    /// See [`LaunchError`]; also if both `added` and `row_of` are given.
    pub fn launch(&self) -> Result<Launch, LaunchError> {
        let kernel = of_type("a norm", self.dtype, ["semmoe_norm_f32", "semmoe_norm_bf16"])?;
        let width = Width { hidden: self.hidden, dtype: self.dtype };
        let hidden = width.check()?;
        // Rows that are written twice would race.
        let both = u64::from(self.added.is_some() && self.row_of.is_some());
        in_range("row lists together with added rows", both, 0, 0)?;
        let sources = match self.row_of {
            None => self.rows,
            Some(_) => (self.residual.bytes / width.bytes(1)).min(u64::from(u32::MAX)),
        };
        let params = RowNormParams {
            residual: width.rows("residual", self.residual, sources)?,
            added: self.added.map_or(Ok(0), |added| width.rows("added", added, self.rows))?,
            row_of: address_or_null("row list", self.row_of, bytes_of(&[self.rows, 4]), 4)?,
            weight: address("norm weight", self.weight, bytes_of(&[self.hidden, 4]), width.alignment_of_floats())?,
            out: width.rows("out", self.out, self.rows)?,
            rows: in_range("rows", self.rows, 0, i32::MAX as u64)?,
            sources: in_range("rows of the residual", sources, 0, u64::from(u32::MAX))?,
            hidden,
            epsilon: self.epsilon,
        };
        apart(kernel, [self.rows, 1], width.threads(ROW_NORM_THREADS), &params)
    }
}

/// Computes `residual += added`, or `residual += sigmoid(gate) * added`.
#[derive(Clone, Copy, Debug)]
pub struct AddRows {
    /// `[rows, hidden]`
    pub residual: Buffer,
    /// `[rows, hidden]`
    pub added: Buffer,
    /// `[rows]` f32, one logit per row
    pub gate: Option<Buffer>,
    /// Rows.
    pub rows: u64,
    /// Elements per row.
    pub hidden: u64,
    /// Element type of the rows.
    pub dtype: Dtype,
}

impl AddRows {
    /// # Errors
    /// See [`LaunchError`].
    pub fn launch(&self) -> Result<Launch, LaunchError> {
        let kernel = of_type("a sum of rows", self.dtype, ["semmoe_add_rows_f32", "semmoe_add_rows_bf16"])?;
        let width = Width { hidden: self.hidden, dtype: self.dtype };
        let params = AddRowsParams {
            residual: width.rows("residual", self.residual, self.rows)?,
            added: width.rows("added", self.added, self.rows)?,
            gate: address_or_null("gate", self.gate, bytes_of(&[self.rows, 4]), 4)?,
            rows: rows_in_range(self.rows)?,
            hidden: width.check()?,
        };
        width.launch(kernel, params.rows, &params)
    }
}

/// Returns the experts' rows to their tokens: `out[r]` is the sum of `weights[q] * y[q]` over the pairs `q =
/// pair_of[first_pair[r] .. first_pair[r + 1]]`, in order; 0 if there are none. A pair out of range results in a row of
/// NaN. A row's pairs may be followed by `u32::MAX`; a row that has nothing else is not written.
#[derive(Clone, Copy, Debug)]
pub struct SumPairs {
    /// `[pairs, hidden]`
    pub y: Buffer,
    /// `[rows + 1]` u32
    pub first_pair: Buffer,
    /// `[pairs]` u32
    pub pair_of: Buffer,
    /// `[pairs]` f32
    pub weights: Buffer,
    /// `[rows, hidden]`
    pub out: Buffer,
    /// Rows of `y`.
    pub pairs: u64,
    /// Rows of `out`.
    pub rows: u64,
    /// Elements per row.
    pub hidden: u64,
    /// Element type of the rows.
    pub dtype: Dtype,
}

impl SumPairs {
    /// # Errors
    /// See [`LaunchError`].
    pub fn launch(&self) -> Result<Launch, LaunchError> {
        let kernel = of_type("a sum of pairs", self.dtype, ["semmoe_sum_pairs_f32", "semmoe_sum_pairs_bf16"])?;
        let width = Width { hidden: self.hidden, dtype: self.dtype };
        let rows = rows_in_range(self.rows)?;
        let params = SumPairsParams {
            y: width.rows("expert rows", self.y, self.pairs)?,
            first_pair: address("first pairs", self.first_pair, (self.rows + 1) * 4, 4)?,
            pair_of: address("pairs", self.pair_of, bytes_of(&[self.pairs, 4]), 4)?,
            weights: address("weights", self.weights, bytes_of(&[self.pairs, 4]), 4)?,
            out: width.rows("out", self.out, self.rows)?,
            rows,
            pairs: in_range("pairs", self.pairs, 0, i32::MAX as u64)?,
            hidden: width.check()?,
            padding: 0,
        };
        width.launch(kernel, params.rows, &params)
    }
}
