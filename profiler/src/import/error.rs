//! Why nothing was imported.

use std::error::Error;
use std::path::{Path, PathBuf};

use semmoe_tables::FormatError;

use crate::BadRecord;

/// An error of an import; every message is one sentence that names the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The file, or its content, cannot be imported.
    #[error("{}: {source}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The problem.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The files are of several kinds.
    #[error("some files have counts and some have tokens, expected files of one kind")]
    Mixed,
    /// The files contain nothing to import.
    #[error("{0} files hold no token with a route")]
    Nothing(usize),
    /// Too many records were left out.
    #[error(
        "{bad} of {records} records were bad, more than {allowed} allowed, and nothing was written; first, {first}"
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

/// Why a file, or a record of one, cannot be imported.
#[derive(Debug, thiserror::Error)]
pub(super) enum ContentError {
    #[error("cannot be read: {0}")]
    Io(#[from] std::io::Error),
    #[error("{0}, expected {{\"logical_count\": [layers][experts]}}")]
    Json(#[from] serde_json::Error),
    /// The request would not be valid in a trace.
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error("a .{kind} file is converted first: `semmoe-convert {file}` writes {file}.safetensors, which is imported")]
    Unconverted { kind: String, file: String },
    /// SGLang's recorder ran in a mode that records no tokens.
    #[error(
        "its records have no `topk_ids_of_layer`: the mode per_pass counts experts without tokens; record with \
         --expert-distribution-recorder-mode per_token, or stat for loads"
    )]
    PerPass,
    #[error("there is no {0}")]
    Missing(String),
    #[error("{found}, expected {expected}")]
    Unexpected { found: String, expected: String },
    /// The route of a token, by its index in the record and the dump's row.
    #[error("token {token}, layer {layer}: {source}")]
    Route { token: usize, layer: usize, source: Box<ContentError> },
    #[error("layer {layer}, slot {slot}: the routes name it {times} times, `global_physical_count` does not")]
    OtherCount { layer: usize, slot: usize, times: i64 },
    #[error("the counts of expert {expert} do not fit into 64 bits")]
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

    /// Whether the files as a whole are at fault.
    pub(crate) fn is_input(&self) -> bool {
        !matches!(self, Self::TooManyBad { .. })
    }
}
