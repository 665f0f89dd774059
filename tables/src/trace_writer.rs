//! Writes traces larger than memory: requests go to disk as they arrive.

use std::path::{Path, PathBuf};

use half::f16;

use crate::container::Spool;
use crate::trace::{ExpertRows, narrow};
use crate::trace_builder::TraceTensors;
use crate::trace_check::{VALID_WEIGHT, valid_weight};
use crate::{FormatError, ModelInfo, Provenance, TraceBuilder};

/// Accepts requests in file order and writes the same file as [`TraceBuilder`] would. Uses 12 bytes of memory per
/// request.
#[derive(Debug)]
pub struct TraceWriter {
    out: PathBuf,
    /// An empty builder, used for its model, its provenance and its checks.
    rules: TraceBuilder,
    offsets: Vec<u64>,
    prompt_lengths: Vec<u32>,
    token_ids: Spool,
    experts: Spool,
    weights: Option<Spool>,
    /// Buffer for a row of experts or weights.
    narrowed: Vec<u8>,
}

impl TraceWriter {
    /// Starts a trace to be written at `out`.
    ///
    /// # Errors
    /// If the model is invalid, or the directory is not writable.
    pub fn create(out: &Path, model: ModelInfo, provenance: Provenance, weights: bool) -> Result<Self, FormatError> {
        Ok(TraceWriter {
            rules: TraceBuilder::new(model, provenance)?,
            offsets: vec![0],
            prompt_lengths: Vec::new(),
            token_ids: Spool::beside(out)?,
            experts: Spool::beside(out)?,
            weights: weights.then(|| Spool::beside(out)).transpose()?,
            narrowed: Vec::new(),
            out: out.to_path_buf(),
        })
    }

    /// Adds a request, like [`TraceBuilder::push`]. After a disk error the trace is unusable; after any other error it
    /// is unchanged.
    ///
    /// # Errors
    /// Names the problem: wrong lengths, ids out of range, repeated experts, weights that are not finite, or a disk
    /// error.
    pub fn push(
        &mut self,
        token_ids: &[u32],
        prompt_len: u32,
        experts: &[u16],
        weights: Option<&[f16]>,
    ) -> Result<(), FormatError> {
        self.rules.check(token_ids, prompt_len, experts)?;
        self.check_weights(experts.len(), weights)?;
        self.token_ids.push(token_ids)?;
        if narrow(self.rules.model()) {
            self.narrowed.clear();
            // Ids are below 255 or UNKNOWN_EXPERT, whose low byte is the narrow maximum.
            self.narrowed.extend(experts.iter().map(|&id| id as u8));
            self.experts.push(&self.narrowed)?;
        } else {
            self.experts.push(experts)?;
        }
        if let (Some(spool), Some(weights)) = (&mut self.weights, weights) {
            let known = |(&weight, &id)| if id == crate::UNKNOWN_EXPERT { f16::ZERO } else { weight };
            spool.push(&weights.iter().zip(experts).map(known).collect::<Vec<f16>>())?;
        }
        let end = self.offsets.last().copied().unwrap_or_default() + token_ids.len() as u64;
        self.offsets.push(end);
        self.prompt_lengths.push(prompt_len);
        Ok(())
    }

    fn check_weights(&self, expected: usize, weights: Option<&[f16]>) -> Result<(), FormatError> {
        let found = weights.map(<[f16]>::len);
        if found != self.weights.as_ref().map(|_| expected) {
            let words = |n: Option<usize>| n.map_or("none".to_owned(), |n| format!("{n} elements"));
            let expected = words(self.weights.as_ref().map(|_| expected));
            return Err(FormatError::value("weights", "the request", words(found), expected));
        }
        match weights.unwrap_or_default().iter().find(|&&weight| !valid_weight(weight)) {
            None => Ok(()),
            Some(weight) => Err(FormatError::value("weights", "the request", weight, VALID_WEIGHT)),
        }
    }

    /// Adds an accepted request of another trace of the same shape, without its weights.
    ///
    /// # Errors
    /// See [`TraceWriter::push`].
    pub fn push_rows(&mut self, token_ids: &[u32], prompt_len: u32, rows: ExpertRows<'_>) -> Result<(), FormatError> {
        let wide = match rows {
            ExpertRows::Narrow(ids) => {
                let widen = |&id: &u8| if id == u8::MAX { crate::UNKNOWN_EXPERT } else { id.into() };
                ids.iter().map(widen).collect()
            }
            ExpertRows::Wide(ids) => ids.to_vec(),
        };
        self.push(token_ids, prompt_len, &wide, None)
    }

    /// Number of requests so far.
    pub fn requests(&self) -> usize {
        self.prompt_lengths.len()
    }

    /// Number of tokens so far.
    pub fn tokens(&self) -> u64 {
        self.offsets.last().copied().unwrap_or_default()
    }

    /// Returns the model passed to [`TraceWriter::create`].
    pub fn model(&self) -> &ModelInfo {
        self.rules.model()
    }

    /// Writes the trace atomically; returns the digest.
    ///
    /// # Errors
    /// [`FormatError::Io`] names the path.
    pub fn finish(self) -> Result<String, FormatError> {
        let (token_ids, experts) = (self.token_ids.finish()?, self.experts.finish()?);
        let weights = self.weights.map(Spool::finish).transpose()?;
        let tensors = TraceTensors {
            offsets: &self.offsets,
            prompt_lengths: &self.prompt_lengths,
            token_ids: (&token_ids).into(),
            experts: (&experts).into(),
            weights: weights.as_ref().map(Into::into),
        };
        tensors.layout(self.rules.model(), &self.rules.provenance).write(&self.out)
    }
}
