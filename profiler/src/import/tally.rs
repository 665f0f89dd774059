//! Counts skipped records and checks how many are tolerated.

use std::path::Path;

use super::error::{ContentError, ImportError};
use crate::BadRecord;

/// Number of bad records to list; the rest are only counted.
const LISTED: usize = 100;

/// Records so far.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) records: u64,
    pub(super) repeated: u64,
    pub(super) bad_count: u64,
    /// The first bad records.
    pub(super) bad: Vec<BadRecord>,
}

impl Tally {
    /// Counts a record that was added, or skipped because of an error.
    pub(super) fn count(&mut self, path: &Path, record: String, added: Result<(), ContentError>) {
        self.records += 1;
        let Err(error) = added else { return };
        self.bad_count += 1;
        if self.bad.len() < LISTED {
            self.bad.push(BadRecord { file: path.to_owned(), record, reason: error.to_string() });
        }
    }

    /// Fails if too many records are bad.
    pub(super) fn check(&self, max_bad: f64) -> Result<(), ImportError> {
        // Exact, as there are fewer than 2^53 records.
        let allowed = (self.records as f64 * max_bad) as u64;
        match self.bad.first() {
            Some(first) if self.bad_count > allowed => {
                let first = Box::new(first.clone());
                Err(ImportError::TooManyBad { bad: self.bad_count, records: self.records, allowed, first })
            }
            _ => Ok(()),
        }
    }
}
