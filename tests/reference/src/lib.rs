//! The collectives over P ranks at once, written as plainly as possible: the reference that every backend must equal
//! bit for bit.
//!
//! Slices are indexed by rank first: `parts[r]` is rank r's input, and element r of the result is rank r's output. H =
//! width of a row, n = tokens, m_r = rows of rank r. Sums are in f32 in rank order 0..P, start with rank 0's value and
//! are rounded once to the element type ([`Element::round`]). Moves keep every bit.

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

/// A rank's output of the fused variant.
#[derive(Clone, PartialEq, Debug)]
pub struct NormedRows<T> {
    /// `[m_r, H]`: the new residual, sum + residual.
    pub residual: Vec<T>,
    /// `[m_r, H]`: its RMSNorm times the weight, the layer's input.
    pub normed: Vec<T>,
}

/// Reduce-scatter, shuffled if the split is: `out_r[i] = sum over q of parts[q][token(offsets[r] + i)]`. `parts[q]` is
/// `[n, H]`; element r of the result is `[m_r, H]`.
///
/// # Errors
/// Lengths that do not match the split.
pub fn reduce_scatter<T: Element>(
    parts: &[&[T]],
    hidden: usize,
    split: RowSplit<'_>,
) -> Result<Vec<Vec<T>>, KernelError> {
    let sums = sum_rows(parts, hidden, split)?;
    Ok(sums.into_iter().map(|rows| rows.into_iter().map(T::round).collect()).collect())
}

/// Reduce-scatter fused with residual and norm. With s the unrounded f32 sum and h = s + residual of the token,
/// `residual_r = round(h)` and `normed_r = round((h * inverse_rms(h)) * weight)`, each `*` and `+` rounded to f32.
///
/// # Errors
/// Lengths that do not match the split.
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

/// Allgather, the exact inverse of the scatter: `out[token(offsets[r] + i)] = rows[r][i]`, `[n, H]`. All ranks get
/// equal results, so only one is returned. `rows[r]` is `[m_r, H]`.
///
/// # Errors
/// Lengths that do not match the split.
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

/// All-reduce: `out[i] = sum over q of parts[q][i]`. All ranks get equal results, so only one is returned. `parts[q]`
/// is `[len]`.
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

/// Sums in rank order, starting with rank 0's value: minus zero stays minus zero.
fn sum<T: Element>(parts: &[&[T]], at: usize) -> f32 {
    parts.iter().map(|part| part[at].widen()).reduce(|sum, value| sum + value).unwrap_or_default()
}
