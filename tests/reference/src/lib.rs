//! The collectives over P ranks at once, as plainly as they can be written: what every backend must equal bit for bit.
//!
//! Slices are indexed by rank first: `parts[r]` is what rank r gives, and element r of the answer is what rank r gets.
//! H = width of a row, n = tokens, m_r = rows of rank r. Sums are in f32 in rank order 0..P, begin with rank 0's value
//! and are rounded once to the element type ([`Element::round`]). Moves keep every bit.

pub mod attention;
pub mod data;
mod exchange;
mod hybrid;
pub mod law;
pub mod moved;
pub mod product;

pub use exchange::{Dispatched, combine, dispatch};
pub use hybrid::{NodeRows, hybrid_combine, hybrid_dispatch};

use semmoe_kernels::{Element, KernelError, ResidualNorm, RowSplit, check_len, inverse_rms};

/// A rank's rows out of the fused variant.
#[derive(Clone, PartialEq, Debug)]
pub struct NormedRows<T> {
    /// `[m_r, H]`: the residual to go on with, sum + residual.
    pub residual: Vec<T>,
    /// `[m_r, H]`: its RMSNorm times the weight, the layer's input.
    pub normed: Vec<T>,
}

/// Reduce-scatter, shuffled if the split is: `out_r[i] = sum over q of parts[q][token(offsets[r] + i)]`.
/// `parts[q]` is `[n, H]`; the answer's r-th element is `[m_r, H]`.
///
/// # Errors
/// Lengths that do not fit the split.
pub fn reduce_scatter<T: Element>(
    parts: &[&[T]],
    hidden: usize,
    split: RowSplit<'_>,
) -> Result<Vec<Vec<T>>, KernelError> {
    let sums = sum_rows(parts, hidden, split)?;
    Ok(sums.into_iter().map(|rows| rows.into_iter().map(T::round).collect()).collect())
}

/// The same, fused: with s the f32 sum, not rounded, and h = s + residual of the token,
/// `residual_r = round(h)` and `normed_r = round((h * inverse_rms(h)) * weight)`, each `*` and `+` rounded to f32.
///
/// # Errors
/// Lengths that do not fit the split.
pub fn reduce_scatter_norm<T: Element>(
    parts: &[&[T]],
    hidden: usize,
    split: RowSplit<'_>,
    norm: ResidualNorm<'_, T>,
) -> Result<Vec<NormedRows<T>>, KernelError> {
    norm.check(split.tokens(), hidden)?;
    let mut answer = Vec::new();
    for (rank, mut sums) in sum_rows(parts, hidden, split)?.into_iter().enumerate() {
        let mut rows = NormedRows { residual: Vec::new(), normed: Vec::new() };
        for (position, row) in split.positions(rank).zip(sums.chunks_exact_mut(hidden.max(1))) {
            let token = split.token(position);
            for (value, residual) in row.iter_mut().zip(&norm.residual[token * hidden..]) {
                *value += residual.widen();
            }
            let scale = inverse_rms(row, norm.epsilon);
            rows.residual.extend(row.iter().map(|&value| T::round(value)));
            rows.normed.extend(row.iter().zip(norm.weight).map(|(&v, weight)| T::round((v * scale) * weight.widen())));
        }
        answer.push(rows);
    }
    Ok(answer)
}

/// Allgather, the exact inverse placement: `out[token(offsets[r] + i)] = rows[r][i]`, the same `[n, H]` on every rank,
/// so that it is given once. `rows[r]` is `[m_r, H]`.
///
/// # Errors
/// Lengths that do not fit the split.
pub fn allgather<T: Element>(rows: &[&[T]], hidden: usize, split: RowSplit<'_>) -> Result<Vec<T>, KernelError> {
    check_len("ranks", rows.len(), split.ranks())?;
    let mut out = vec![T::zeroed(); split.tokens() * hidden];
    for (rank, rows) in rows.iter().enumerate() {
        check_len("rows", rows.len(), split.positions(rank).len() * hidden)?;
        for (i, position) in split.positions(rank).enumerate() {
            let token = split.token(position);
            out[token * hidden..][..hidden].copy_from_slice(&rows[i * hidden..][..hidden]);
        }
    }
    Ok(out)
}

/// All-reduce: `out[i] = sum over q of parts[q][i]`, the same on every rank, so that it is given once. `parts[q]` is
/// `[len]`.
///
/// # Errors
/// Parts of different lengths, or none.
pub fn all_reduce<T: Element>(parts: &[&[T]]) -> Result<Vec<T>, KernelError> {
    let first = parts.first().ok_or(KernelError::NoRanks)?;
    for part in parts {
        check_len("part", part.len(), first.len())?;
    }
    Ok((0..first.len()).map(|i| T::round(sum(parts, i))).collect())
}

fn sum_rows<T: Element>(parts: &[&[T]], hidden: usize, split: RowSplit<'_>) -> Result<Vec<Vec<f32>>, KernelError> {
    check_len("ranks", parts.len(), split.ranks())?;
    for part in parts {
        check_len("part", part.len(), split.tokens() * hidden)?;
    }
    let row = |position| (0..hidden).map(move |column| sum(parts, split.token(position) * hidden + column));
    Ok((0..split.ranks()).map(|rank| split.positions(rank).flat_map(row).collect()).collect())
}

/// In rank order, beginning with rank 0's value: minus zero stays minus zero.
fn sum<T: Element>(parts: &[&[T]], at: usize) -> f32 {
    parts.iter().map(|part| part[at].widen()).reduce(|sum, value| sum + value).unwrap_or_default()
}
