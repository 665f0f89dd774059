//! Argmax: the token with the largest logit.

use super::params::ArgmaxParams;
use super::{address, apart, bytes_of};
use crate::calls::ELEMENT_ALIGNMENT;
use crate::error::LaunchError;
use crate::launch::Launch;
use crate::params::SORT_THREADS;
use crate::team::{Buffer, in_range};

/// Finds the id of each row's largest logit, the lowest id among equal ones. NaN never wins. A row whose largest logit
/// is not finite gets [`Argmax::NONE`].
#[derive(Clone, Copy, Debug)]
pub struct Argmax {
    /// `[rows, vocab]` f32
    pub logits: Buffer,
    /// `[rows]` u32
    pub best: Buffer,
    /// Rows.
    pub rows: u64,
    /// Logits per row.
    pub vocab: u64,
}

impl Argmax {
    /// Marks a row without a result.
    pub const NONE: u32 = u32::MAX;

    /// # Errors
    /// See [`LaunchError`].
    pub fn launch(&self) -> Result<Launch, LaunchError> {
        let rows = in_range("rows", self.rows, 0, i32::MAX as u64)?;
        let vocab = in_range("vocabulary", self.vocab, 1, i32::MAX as u64)?;
        let logits = address("logits", self.logits, bytes_of(&[self.rows, self.vocab, 4]), ELEMENT_ALIGNMENT)?;
        let params = ArgmaxParams { logits, best: address("best", self.best, self.rows * 4, 4)?, rows, vocab };
        // Small rows need only one thread per vector.
        let threads = (self.vocab.div_ceil(4)).next_multiple_of(32).min(u64::from(SORT_THREADS)) as u32;
        apart("semmoe_argmax", [self.rows, 1], threads, &params)
    }
}
