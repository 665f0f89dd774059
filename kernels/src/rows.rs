//! Adds an expert's weighted output rows to the rows of their tokens.

use crate::error::{KernelError, check_below, check_len};

/// Computes `out[rows[i]] += weights[i] * values[i]`, in the order of i; `values` is `[rows, H]`, `out` is `[any, H]`.
///
/// # Errors
/// If a row is out of range of `out`, or lengths do not match.
pub fn add_weighted_rows(
    values: &[f32],
    rows: &[u32],
    weights: &[f32],
    hidden: usize,
    out: &mut [f32],
) -> Result<(), KernelError> {
    check_len("values", values.len(), rows.len() * hidden)?;
    check_len("weights", weights.len(), rows.len())?;
    let bound = out.len().checked_div(hidden).unwrap_or(usize::MAX);
    rows.iter().enumerate().try_for_each(|(index, &row)| check_below("row", index, row as usize, bound))?;
    if hidden == 0 {
        return Ok(());
    }
    for ((&row, &weight), from) in rows.iter().zip(weights).zip(values.chunks_exact(hidden)) {
        let to = &mut out[row as usize * hidden..][..hidden];
        for (sum, value) in to.iter_mut().zip(from) {
            *sum += weight * value;
        }
    }
    Ok(())
}
