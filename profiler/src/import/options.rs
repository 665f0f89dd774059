//! Options and report of an import.

use std::path::PathBuf;

use semmoe_tables::ModelInfo;
use serde::Serialize;

use super::Loads;
use crate::BadRecord;

/// Who wrote the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// SGLang's expert distribution recorder: `per_token` (a trace), `stat` and `stat_approx` (expert loads).
    Sglang,
    /// Counts per layer and expert, as EPLB takes them: arrays or JSON (expert loads).
    Eplb,
    /// Arrays of tokens and routes (a trace).
    Routes,
}

impl Format {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sglang => "sglang",
            Self::Eplb => "eplb",
            Self::Routes => "routes",
        }
    }
}

/// Options of an import.
#[derive(Clone, Debug)]
pub struct ImportOptions {
    /// Who wrote the files.
    pub format: Format,
    /// The files.
    pub files: Vec<PathBuf>,
    /// Where the trace or the loads go.
    pub out: PathBuf,
    /// The model: dumps do not contain it.
    pub model: ModelInfo,
    /// RFC 3339.
    pub created: String,
    /// Share of the records that may be left out, 0 to 1.
    pub max_bad: f64,
    /// A profile to compare loads with.
    pub against: Option<PathBuf>,
}

/// The output.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Imported {
    /// A trace.
    Trace {
        /// Its digest.
        digest: String,
        /// Its requests.
        requests: usize,
        /// Its tokens.
        tokens: usize,
    },
    /// Expert loads.
    Loads(Loads),
}

/// The outcome.
#[derive(Clone, Debug, Serialize)]
pub struct ImportReport {
    /// The file written.
    pub out: PathBuf,
    /// Files read.
    pub files: usize,
    /// The output.
    #[serde(flatten)]
    pub imported: Imported,
    /// Records found, bad ones included.
    pub records: u64,
    /// Of these, the same forward pass again in another rank's file: not counted twice.
    pub repeated: u64,
    /// Records left out.
    pub bad_records: u64,
    /// The first hundred of them.
    pub bad: Vec<BadRecord>,
}
