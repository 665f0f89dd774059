//! Traces of any size, read in pieces: requests are checked one by one and pages behind the reader are released.

use std::ops::Range;
use std::path::Path;

use crate::container::Container;
use crate::trace::{ExpertRows, FORMAT};
use crate::trace_check::RequestCheck;
use crate::{FormatError, ModelInfo, Provenance, Trace, TraceRequest};

/// A trace whose header, shapes and offsets were checked when opened, but not its requests. Use a request only after
/// [`TraceRows::check`] has accepted it.
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

    /// Returns the model that was traced.
    pub fn model(&self) -> &ModelInfo {
        self.0.model()
    }

    /// Returns the origin of the data.
    pub fn provenance(&self) -> &Provenance {
        self.0.provenance()
    }

    /// R: the number of requests.
    pub fn requests(&self) -> usize {
        self.0.requests()
    }

    /// n: the number of tokens over all requests.
    pub fn tokens(&self) -> usize {
        self.0.tokens()
    }

    /// Whether the trace contains router weights.
    pub fn has_weights(&self) -> bool {
        self.0.has_weights()
    }

    /// Creates the state needed to check requests of this trace.
    pub fn rules(&self) -> RequestCheck {
        RequestCheck::new(self.0.model())
    }

    /// Checks that request `r` conforms to the format.
    ///
    /// # Errors
    /// Names the tensor, what was found and what was expected.
    ///
    /// # Panics
    /// If `r` is not below [`TraceRows::requests`].
    pub fn check(&self, r: usize, rules: &mut RequestCheck) -> Result<(), FormatError> {
        self.0.check_request(r, rules)
    }

    /// Returns request `r`, which [`TraceRows::check`] must have accepted.
    ///
    /// # Panics
    /// If `r` is not below [`TraceRows::requests`].
    pub fn request(&self, r: usize) -> TraceRequest<'_> {
        self.0.request(r)
    }

    /// Returns the experts of request `r` as stored in the file, [n, L, k].
    ///
    /// # Panics
    /// If `r` is not below [`TraceRows::requests`].
    pub fn experts(&self, r: usize) -> ExpertRows<'_> {
        self.0.rows(self.0.token_range(r))
    }

    /// Releases the pages of some requests; they are read again on the next access.
    pub fn release(&self, requests: Range<usize>) {
        let offsets = self.0.all_offsets();
        if let (Some(&start), Some(&end)) = (offsets.get(requests.start), offsets.get(requests.end)) {
            self.0.release(start as usize..end as usize);
        }
    }
}
