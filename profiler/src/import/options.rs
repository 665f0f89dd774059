//! Options and report of an import.

use std::path::PathBuf;

use semmoe_tables::ModelInfo;
use serde::Serialize;

use super::Loads;
use crate::BadRecord;

/// The tool that produced the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// SGLang's expert distribution recorder: `per_token` (a trace), `stat` and `stat_approx` (expert loads).
    Sglang,
    /// Counts per layer and expert as used by EPLB, in arrays or JSON (expert loads).
    Eplb,
    /// Arrays of tokens and routes (a trace).
    Routes,
}

impl Format {
    /// Name on the command line.
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
    /// The tool that produced the files.
    pub format: Format,
    /// The input files.
    pub files: Vec<PathBuf>,
    /// The output file for the trace or the loads.
    pub out: PathBuf,
    /// The model, which the dumps do not describe.
    pub model: ModelInfo,
    /// RFC 3339.
    pub created: String,
    /// Tolerated fraction of bad records, 0 to 1.
    pub max_bad: f64,
    /// A profile to compare loads with.
    pub against: Option<PathBuf>,
}

/// The kind of output.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Imported {
    /// A trace.
    Trace {
        /// Digest of the trace.
        digest: String,
        /// Number of requests.
        requests: usize,
        /// Number of tokens.
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
    /// Number of files read.
    pub files: usize,
    /// The output.
    #[serde(flatten)]
    pub imported: Imported,
    /// Number of records found, including bad ones.
    pub records: u64,
    /// Number of forward passes repeated in another rank's file, which are counted once.
    pub repeated: u64,
    /// Number of records skipped as bad.
    pub bad_records: u64,
    /// The first hundred bad records.
    pub bad: Vec<BadRecord>,
}
