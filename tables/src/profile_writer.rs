//! Writes profiles larger than memory: rows arrive in file order and go to disk.

use std::path::{Path, PathBuf};

use crate::container::Spool;
use crate::profile::{add_tokens, check_routed, check_row};
use crate::profile_builder::ProfileTensors;
use crate::{FormatError, LayerIdx, ModelInfo, Phase, ProfileRow, Provenance, TokenId};

/// Accepts the rows of a profile in file order (by layer, then token) and writes the same file as
/// [`crate::ProfileBuilder`] would from those counts. Uses 8 bytes of memory per layer and token of the vocabulary.
#[derive(Debug)]
pub struct ProfileWriter {
    out: PathBuf,
    model: ModelInfo,
    provenance: Provenance,
    phase: Phase,
    token_count: Vec<u64>,
    indptr: Vec<u64>,
    seen: Vec<bool>,
    expert: Spool,
    count: Spool,
    entries: u64,
}

impl ProfileWriter {
    /// Starts a profile to be written at `out`. `token_count` is \[V\]: occurrences of every token with a known route
    /// in at least one layer.
    ///
    /// # Errors
    /// If the model or the counts are invalid, or the directory is not writable.
    pub fn create(
        out: &Path,
        model: ModelInfo,
        provenance: Provenance,
        phase: Phase,
        token_count: Vec<u64>,
    ) -> Result<Self, FormatError> {
        model.validate()?;
        provenance.validate()?;
        let vocabulary = model.vocab_size as usize;
        if token_count.len() != vocabulary {
            let found = format!("[{}]", token_count.len());
            return Err(FormatError::shape("token_count", found, format!("[{vocabulary}]")));
        }
        token_count.iter().try_fold(0, |sum, &n| add_tokens(sum, n))?;
        Ok(ProfileWriter {
            indptr: Vec::with_capacity(model.layers() * (vocabulary + 1)),
            seen: vec![false; vocabulary],
            expert: Spool::beside(out)?,
            count: Spool::beside(out)?,
            entries: 0,
            out: out.to_path_buf(),
            model,
            provenance,
            phase,
            token_count,
        })
    }

    /// Appends a row; rows without entries may be omitted.
    ///
    /// # Errors
    /// If the row is out of order, could not be the counts of that token, or the disk is full.
    pub fn push(&mut self, layer: LayerIdx, token: TokenId, row: ProfileRow<'_>) -> Result<(), FormatError> {
        if row.experts.is_empty() {
            return Ok(());
        }
        let at = || format!("layer {}, token {}", layer.index(), token.get());
        let index = layer.index() * (self.token_count.len() + 1) + token.index();
        if layer.index() >= self.model.layers() || token.index() >= self.token_count.len() || index < self.indptr.len()
        {
            return Err(FormatError::value("indptr", at(), "a row", "rows of the model in ascending order"));
        }
        check_row(&self.model, row, self.token_count[token.index()])
            .map_err(|(tensor, found, expected)| FormatError::value(tensor, at(), found, expected))?;
        self.indptr.resize(index + 1, self.entries);
        self.entries += row.experts.len() as u64;
        self.seen[token.index()] = true;
        self.expert.push(row.experts)?;
        self.count.push(row.counts)
    }

    /// Writes the profile atomically; returns the digest.
    ///
    /// # Errors
    /// If a token occurred but has no row, or the disk is full.
    pub fn finish(mut self) -> Result<String, FormatError> {
        check_routed(&self.token_count, &self.seen)?;
        self.indptr.resize(self.model.layers() * (self.token_count.len() + 1), self.entries);
        let (expert, count) = (self.expert.finish()?, self.count.finish()?);
        let tensors = ProfileTensors {
            token_count: &self.token_count,
            indptr: &self.indptr,
            expert: (&expert).into(),
            count: (&count).into(),
        };
        tensors.layout(&self.model, &self.provenance, self.phase).write(&self.out)
    }
}
