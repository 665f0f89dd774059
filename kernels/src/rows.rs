//! An expert's rows, added with weights where they came from.

use crate::error::{KernelError, check_len};

/// `out[rows[i]] += weights[i] * values[i]`, in the order of i; `values` is `[rows, H]`, `out` is `[any, H]`.
///
/// # Errors
/// A row that `out` does not have, or lengths that do not fit.
pub fn add_weighted_rows(
    values: &[f32],
    rows: &[u32],
    weights: &[f32],
    hidden: usize,
    out: &mut [f32],
) -> Result<(), KernelError> {
    check_len("values", values.len(), rows.len() * hidden)?;
    check_len("weights", weights.len(), rows.len())?;
    check_rows(rows, out.len(), hidden)?;
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

fn check_rows(rows: &[u32], elements: usize, hidden: usize) -> Result<(), KernelError> {
    let bound = elements.checked_div(hidden).unwrap_or(usize::MAX);
    match rows.iter().position(|&row| row as usize >= bound) {
        None => Ok(()),
        Some(index) => Err(KernelError::OutOfRange { what: "row", index, found: rows[index] as usize, bound }),
    }
}
