//! Reduce-scatter, allgather and all-reduce, plain and shuffled.

use std::ops::Range;

use semmoe_kernels::collectives::Norm;
use semmoe_kernels::{
    Element, NormRow, ResidualNorm, RowSplit, check_len, norm_row, prefetch, sum_rows, sum_rows_wide,
};

use crate::call::{Call, Operation};
use crate::communicator::Communicator;
use crate::error::RankError;
use crate::span::{Span, overlap};
use crate::{MAX_NORM_WIDTH, MAX_WORLD};

impl Communicator {
    /// Reduce-scatter by pulling, shuffled if the split is: `out[i] = sum over q of part_q[token(offsets[rank] + i)]`,
    /// as defined by `reduce_scatter` in `tests/reference`. `part` is `[n, H]`, `out` is `[m, H]`. Reads P x m rows and
    /// writes m.
    ///
    /// # Errors
    /// If operands do not match (checked before any work), or a rank left, is late or makes a different call.
    pub fn reduce_scatter<T: Element>(
        &mut self,
        part: Span<T>,
        hidden: usize,
        split: RowSplit<'_>,
        out: &mut [T],
    ) -> Result<(), RankError> {
        let rows = self.check_reduce(part, hidden, split, out)?;
        self.enter(&call::<T>(Operation::ReduceScatter, part.offset(), hidden, split))?;
        let ahead = (PREFETCH_BYTES / size_of::<T>()).min(hidden);
        // The slices are rewritten for each token, for existing ranks only.
        let mut pieces = self.pieces(part, 0, 0);
        for (to, position) in out.chunks_exact_mut(hidden.max(1)).zip(rows.clone()) {
            if position + 1 < rows.end {
                self.fill(&mut pieces, part, split.token(position + 1) * hidden, ahead);
                pieces.get().iter().for_each(|piece| prefetch(piece));
            }
            self.fill(&mut pieces, part, split.token(position) * hidden, hidden);
            sum_rows(pieces.get(), to);
        }
        self.exit()
    }

    /// Reduce-scatter with residual and RMSNorm, as defined by `reduce_scatter_norm` in `tests/reference`. `out`, `[m,
    /// H]`, receives the normed rows.
    ///
    /// # Errors
    /// See [`Communicator::reduce_scatter`]; also if rows are wider than [`MAX_NORM_WIDTH`].
    pub fn reduce_scatter_norm<T: Element>(
        &mut self,
        part: Span<T>,
        hidden: usize,
        split: RowSplit<'_>,
        norm: Norm<'_, T>,
        out: &mut [T],
    ) -> Result<(), RankError> {
        let rows = self.check_reduce(part, hidden, split, out)?;
        let Norm { residual, weight, epsilon, residual_out } = norm;
        check_len("residual out", residual_out.len(), out.len())?;
        ResidualNorm { residual, weight, epsilon }.check(split.tokens(), hidden)?;
        RankError::check_limit("columns of a normed row", hidden, MAX_NORM_WIDTH)?;
        self.enter(&call::<T>(Operation::ReduceScatterNorm, part.offset(), hidden, split))?;
        let mut wide = std::mem::take(&mut self.wide_row);
        wide.resize(hidden, 0.0);
        let width = hidden.max(1);
        let outs = out.chunks_exact_mut(width).zip(residual_out.chunks_exact_mut(width));
        for ((out, residual_out), position) in outs.zip(rows) {
            let token = split.token(position);
            sum_rows_wide(self.pieces(part, token * hidden, hidden).get(), &mut wide);
            let residual = &residual[token * hidden..][..hidden];
            norm_row(NormRow { sum: &mut wide, residual, weight, epsilon, residual_out, out });
        }
        self.wide_row = wide;
        self.exit()
    }

    /// Allgather by pushing to the exact inverse positions: `out_q[token(offsets[rank] + i)] = rows[i]` on every rank
    /// q, as defined by `allgather` in `tests/reference`. `rows` is `[m, H]`, `out` is `[n, H]`. Reads m rows and
    /// writes P x m.
    ///
    /// # Errors
    /// If operands do not match (checked before any work), or a rank left, is late or makes a different call.
    pub fn allgather<T: Element>(
        &mut self,
        rows: &[T],
        hidden: usize,
        split: RowSplit<'_>,
        out: Span<T>,
    ) -> Result<(), RankError> {
        self.check_part(out, hidden, split)?;
        let positions = split.positions(self.rank);
        check_len("rows", rows.len(), positions.len() * hidden)?;
        self.enter(&call::<T>(Operation::Allgather, out.offset(), hidden, split))?;
        for (row, position) in rows.chunks_exact(hidden.max(1)).zip(positions) {
            let at = split.token(position) * hidden;
            for step in 0..self.world() {
                let peer = (self.rank + step) % self.world();
                // SAFETY: the token is below n, so its row is within `out`, which was checked against the buffer.
                // Between entry and exit, only the rank that has the token writes its row, and no rank reads the row;
                // `row` is not in a symmetric buffer.
                unsafe { self.at(peer, out).add(at).copy_from_nonoverlapping(row.as_ptr(), hidden) };
            }
        }
        self.exit()
    }

    /// All-reduce: `out_q[i] = sum over p of part_p[i]` on every rank q. Each rank sums an even part and pushes it to
    /// all ranks. `part` and `out` must be equal or must not overlap.
    ///
    /// # Errors
    /// If operands do not match (checked before any work), or a rank left, is late or makes a different call.
    pub fn all_reduce<T: Element>(&mut self, part: Span<T>, out: Span<T>) -> Result<(), RankError> {
        self.check_alive()?;
        self.check_span("the part", part)?;
        self.check_span("out", out)?;
        check_len("out", out.len(), part.len())?;
        if part.offset() != out.offset() && overlap(&part.bytes(), &out.bytes()) {
            return Err(RankError::Overlap { first: "the part", second: "out" });
        }
        let mut call = Call::new(Operation::AllReduce, T::DTYPE);
        (call.tokens, call.offsets) = (part.len() as u64, [part.offset() as u64, out.offset() as u64]);
        self.enter(&call)?;
        let (world, rank) = (self.world(), self.rank);
        let (from, to) = (part.len() / world * rank, part.len() / world * (rank + 1));
        let end = if rank + 1 == world { part.len() } else { to };
        let mut sums = [T::zeroed(); SUM_CHUNK];
        for at in (from..end).step_by(SUM_CHUNK) {
            let width = SUM_CHUNK.min(end - at);
            let sums = &mut sums[..width];
            sum_rows(self.pieces(part, at, width).get(), sums);
            for peer in 0..world {
                // SAFETY: the elements are in bounds (checked); only this rank reads and writes them between entry and
                // exit, and the references to the summed rows have ended.
                unsafe { self.at(peer, out).add(at).copy_from_nonoverlapping(sums.as_ptr(), width) };
            }
        }
        self.exit()
    }

    /// Checks a reduce-scatter; returns this rank's positions.
    fn check_reduce<T: Element>(
        &self,
        part: Span<T>,
        hidden: usize,
        split: RowSplit<'_>,
        out: &[T],
    ) -> Result<Range<usize>, RankError> {
        self.check_part(part, hidden, split)?;
        let rows = split.positions(self.rank);
        check_len("out", out.len(), rows.len() * hidden)?;
        Ok(rows)
    }

    fn check_part<T: Element>(&self, part: Span<T>, hidden: usize, split: RowSplit<'_>) -> Result<(), RankError> {
        self.check_alive()?;
        self.check_span("the part", part)?;
        check_len("ranks of the split", split.ranks(), self.world())?;
        Ok(check_len("the part", part.len(), split.tokens().saturating_mul(hidden))?)
    }

    /// Returns these elements of every rank's part. Call it only between entry and exit, when no rank writes them.
    fn pieces<'s, T: Element>(&self, part: Span<T>, at: usize, width: usize) -> Pieces<'s, T> {
        let mut pieces = Pieces { rows: [&[][..]; MAX_WORLD], world: self.world() };
        self.fill(&mut pieces, part, at, width);
        pieces
    }

    /// Refills `pieces`, which avoids creating 64 slices again.
    fn fill<'s, T: Element>(&self, pieces: &mut Pieces<'s, T>, part: Span<T>, at: usize, width: usize) {
        for (rank, row) in pieces.rows.iter_mut().enumerate().take(self.world()) {
            // SAFETY: `at + width` is within the part (guaranteed by callers), the part is within the buffer (checked),
            // any bytes are a valid `T`, and between entry and exit no rank writes the elements that this rank sums.
            *row = unsafe { std::slice::from_raw_parts(self.at(rank, part).add(at), width) };
        }
    }
}

/// Bytes of the next token's row to prefetch on each rank: hardware prefetching stays within a page and does not follow
/// to another token's row.
const PREFETCH_BYTES: usize = 1024;

/// Number of elements summed before they are pushed, chosen to stay in the L1 cache.
const SUM_CHUNK: usize = 2048;

/// One slice per rank.
struct Pieces<'s, T> {
    rows: [&'s [T]; MAX_WORLD],
    world: usize,
}

impl<'s, T> Pieces<'s, T> {
    fn get(&self) -> &[&'s [T]] {
        &self.rows[..self.world]
    }
}

fn call<T: Element>(operation: Operation, offset: usize, hidden: usize, split: RowSplit<'_>) -> Call {
    let mut call = Call::new(operation, T::DTYPE);
    (call.tokens, call.hidden, call.digest) = (split.tokens() as u64, hidden as u64, split.digest());
    call.offsets = [offset as u64, 0];
    call
}
