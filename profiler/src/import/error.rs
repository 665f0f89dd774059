//! Errors that make an import fail.

use std::error::Error;
use std::path::{Path, PathBuf};

use semmoe_tables::FormatError;

use crate::BadRecord;

/// The error type for imports; every message is a single sentence that names the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The file or its content cannot be imported.
    #[error("{}: {source}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The problem.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The files are of different kinds.
    #[error("some files have counts and some have tokens, expected files of one kind")]
    Mixed,
    /// The files contain nothing to import.
    #[error("{0} files contain no token with a route")]
    Nothing(usize),
    /// Too many records were bad.
    #[error(
        "{bad} of {records} records were bad, more than the {allowed} allowed, and nothing was written; first, {first}"
    )]
    TooManyBad {
        /// Number of bad records.
        bad: u64,
        /// Number of all records.
        records: u64,
        /// Number of bad records allowed.
        allowed: u64,
        /// The first bad record.
        first: Box<BadRecord>,
    },
}

/// Reasons to reject a file or a record in it.
#[derive(Debug, thiserror::Error)]
pub(super) enum ContentError {
    #[error("cannot be read: {0}")]
    Io(#[from] std::io::Error),
    #[error("{0}, expected {{\"logical_count\": [layers][experts]}}")]
    Json(#[from] serde_json::Error),
    /// The trace format rejects the request.
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error("convert .{kind} files first: `semmoe-convert {file}` writes {file}.safetensors, which can be imported")]
    Unconverted { kind: String, file: String },
    /// SGLang's recorder ran in a mode that does not record tokens.
    #[error(
        "its records have no `topk_ids_of_layer`: the mode per_pass counts experts without tokens; record with \
         --expert-distribution-recorder-mode per_token, or stat for loads"
    )]
    PerPass,
    #[error("there is no {0}")]
    Missing(String),
    #[error("{found}, expected {expected}")]
    Unexpected { found: String, expected: String },
    /// A token's route is invalid. Gives the token's index in the record and the dump's layer row.
    #[error("token {token}, layer {layer}: {source}")]
    Route { token: usize, layer: usize, source: Box<ContentError> },
    #[error("layer {layer}, slot {slot}: the routes contain it {times} times, unlike `global_physical_count`")]
    OtherCount { layer: usize, slot: usize, times: i64 },
    #[error("the total count of expert {expert} exceeds 64 bits")]
    Overflow { expert: usize },
}

impl ContentError {
    pub(super) fn unexpected(found: impl Into<String>, expected: impl Into<String>) -> Self {
        Self::Unexpected { found: found.into(), expected: expected.into() }
    }

    pub(super) fn shape(name: &str, found: &[u64], expected: impl Into<String>) -> Self {
        Self::unexpected(format!("{name} has shape {found:?}"), expected)
    }
}

impl ImportError {
    pub(super) fn content(path: &Path) -> impl FnOnce(ContentError) -> Self {
        let path = path.to_owned();
        |error| Self::Content { path, source: error.into() }
    }

    /// Whether the files as a whole are invalid, rather than some records.
    pub(crate) fn is_input(&self) -> bool {
        !matches!(self, Self::TooManyBad { .. })
    }
}
