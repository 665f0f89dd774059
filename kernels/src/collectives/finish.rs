//! What becomes of the rows of a reduce-scatter: their sum, or that with residual and RMSNorm in the same pass.

use super::Norm;
use crate::element::Element;
use crate::vector::{NormRow, norm_row, sum_rows, sum_rows_wide};

/// Takes this rank's rows in their order.
pub(super) struct Finish<'n, 'a, T: Element> {
    norm: Option<Norm<'n, T>>,
    /// `[H]`, if there is a norm.
    wide: &'a mut [f32],
    /// The next row of the residual to go on with.
    next: usize,
}

impl<'n, 'a, T: Element> Finish<'n, 'a, T> {
    /// `wide` is a buffer of any length and content. The norm's lengths have been checked.
    pub(super) fn new(norm: Option<Norm<'n, T>>, hidden: usize, wide: &'a mut Vec<f32>) -> Self {
        wide.resize(if norm.is_some() { hidden } else { 0 }, 0.0);
        Self { norm, wide, next: 0 }
    }

    /// The next row: what each rank has of it, in rank order.
    pub(super) fn row(&mut self, of_ranks: &[&[T]], token: usize, out: &mut [T]) {
        let Some(norm) = &mut self.norm else { return sum_rows(of_ranks, out) };
        sum_rows_wide(of_ranks, self.wide);
        let hidden = out.len();
        norm_row(NormRow {
            sum: self.wide,
            residual: &norm.residual[token * hidden..][..hidden],
            weight: norm.weight,
            epsilon: norm.epsilon,
            residual_out: &mut norm.residual_out[self.next * hidden..][..hidden],
            out,
        });
        self.next += 1;
    }
}
