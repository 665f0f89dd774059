//! Traces of any size, read in pieces: requests are checked one by one and pages leave memory behind the reader.

use std::ops::Range;
use std::path::Path;

use crate::container::Container;
use crate::trace::{ExpertRows, FORMAT};
use crate::trace_check::RequestCheck;
use crate::{FormatError, ModelInfo, Provenance, Trace, TraceRequest};

/// A trace whose header, shapes and offsets were checked when it was opened, and whose requests were not: use a request
/// only after [`TraceRows::check`] accepted it.
#[derive(Debug)]
pub struct TraceRows(Trace);

impl TraceRows {
    /// Maps a file.
    ///
    /// # Errors
    /// Names the file, the field or tensor, what was found and what was expected.
    pub fn open(path: &Path) -> Result<Self, FormatError> {
        let trace = Container::open(path, FORMAT).and_then(Trace::unchecked);
        trace.map(TraceRows).map_err(|error| error.in_file(path))
    }

    /// The model that was traced.
    pub fn model(&self) -> &ModelInfo {
        self.0.model()
    }

    /// Where the data came from.
    pub fn provenance(&self) -> &Provenance {
        self.0.provenance()
    }

    /// R: the number of requests.
    pub fn requests(&self) -> usize {
        self.0.requests()
    }

    /// n: the number of tokens of all requests together.
    pub fn tokens(&self) -> usize {
        self.0.tokens()
    }

    /// Whether the trace carries router weights.
    pub fn has_weights(&self) -> bool {
        self.0.has_weights()
    }

    /// The rules of this trace.
    pub fn rules(&self) -> RequestCheck {
        RequestCheck::new(self.0.model())
    }

    /// Whether request `r` is as the format says.
    ///
    /// # Errors
    /// Names the tensor, what was found and what was expected.
    ///
    /// # Panics
    /// When `r` is not below [`TraceRows::requests`].
    pub fn check(&self, r: usize, rules: &mut RequestCheck) -> Result<(), FormatError> {
        self.0.check_request(r, rules)
    }

    /// Request `r`, which was accepted.
    ///
    /// # Panics
    /// When `r` is not below [`TraceRows::requests`].
    pub fn request(&self, r: usize) -> TraceRequest<'_> {
        self.0.request(r)
    }

    /// [n, L, k]: the experts of request `r` as they lie in the file.
    ///
    /// # Panics
    /// When `r` is not below [`TraceRows::requests`].
    pub fn experts(&self, r: usize) -> ExpertRows<'_> {
        self.0.rows(self.0.token_range(r))
    }

    /// Lets the pages of some requests leave memory; they are read again when they are touched.
    pub fn release(&self, requests: Range<usize>) {
        let offsets = self.0.all_offsets();
        if let (Some(&start), Some(&end)) = (offsets.get(requests.start), offsets.get(requests.end)) {
            self.0.release(start as usize..end as usize);
        }
    }
}
