//! Records left out, and how many may be.

use std::path::Path;

use super::ImportError;
use crate::BadRecord;

/// How many are listed; the rest are counted.
const LISTED: usize = 100;

/// Records so far.
#[derive(Debug, Default)]
pub(super) struct Tally {
    records: u64,
    repeated: u64,
    bad_count: u64,
    bad: Vec<BadRecord>,
}

impl Tally {
    pub(super) fn good(&mut self) {
        self.records += 1;
    }

    pub(super) fn repeat(&mut self) {
        self.records += 1;
        self.repeated += 1;
    }

    pub(super) fn bad(&mut self, path: &Path, record: String, reason: String) {
        self.records += 1;
        self.bad_count += 1;
        if self.bad.len() < LISTED {
            self.bad.push(BadRecord { file: path.to_owned(), record, reason });
        }
    }

    pub(super) fn records(&self) -> u64 {
        self.records
    }

    pub(super) fn repeated(&self) -> u64 {
        self.repeated
    }

    pub(super) fn bad_count(&self) -> u64 {
        self.bad_count
    }

    pub(super) fn into_bad(self) -> Vec<BadRecord> {
        self.bad
    }

    /// Whether few enough are bad.
    pub(super) fn check(&self, max_bad: f64) -> Result<(), ImportError> {
        // Below 2^53 records, and a share of them below that.
        let allowed = (self.records as f64 * max_bad) as u64;
        match self.bad.first() {
            Some(first) if self.bad_count > allowed => {
                let (path, record, reason) = (first.file.clone(), first.record.clone(), first.reason.clone());
                Err(ImportError::TooManyBad {
                    bad: self.bad_count,
                    records: self.records,
                    allowed,
                    path,
                    record,
                    reason,
                })
            }
            _ => Ok(()),
        }
    }
}
