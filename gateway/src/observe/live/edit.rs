//! Edits the response to a sampled request and submits it for evaluation, or counts why it was not evaluated.

use bytes::Bytes;
use http::header;
use http::response::Parts;
use semmoe_engines::routed::Place;

use super::Sample;
use super::cutter::Cutter;

/// The edit of one response.
pub(crate) struct Edit {
    /// `None` once the response has been counted, or if it is only edited.
    sample: Option<Sample>,
    cutter: Cutter,
}

impl Edit {
    /// Begins an edit; returns `None` if there is nothing to remove. `events`: the response is an event stream.
    pub(crate) fn begin(sample: Sample, head: &Parts, events: bool) -> Option<Self> {
        if !head.status.is_success() {
            sample.give_up("failed");
            return None;
        }
        if head.headers.get(header::CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity") {
            sample.give_up("encoded");
            return None;
        }
        let cutter = Cutter::new(sample.asking.place, sample.limit_bytes, events);
        Some(Self { sample: Some(sample), cutter })
    }

    /// Creates the edit for a vLLM JSON response whose routed experts neither the client nor the gateway requested.
    pub(crate) fn unasked(limit_bytes: usize) -> Self {
        Self { sample: None, cutter: Cutter::new(Place::Choices { ids: false }, limit_bytes, false) }
    }

    /// Maximum size of an event that is buffered.
    pub(crate) fn limit_bytes(&self) -> usize {
        self.cutter.limit_bytes
    }

    /// Processes the next chunk and returns the bytes to relay now. `whole`: stream chunks are whole events.
    pub(crate) fn push(&mut self, piece: Bytes, whole: bool) -> Bytes {
        let now = self.cutter.push(piece, whole);
        if let Some(outcome) = self.cutter.over
            && let Some(sample) = self.sample.take()
        {
            sample.give_up(outcome);
        }
        now
    }

    /// Completes the response; returns the bytes still to be relayed.
    pub(crate) fn end(&mut self, rest: Bytes) -> Bytes {
        let (rest, newest) = self.cutter.end(rest);
        match (self.sample.take(), newest) {
            (Some(sample), Ok(answer)) => sample.submit(answer),
            (Some(sample), Err(outcome)) => sample.give_up(outcome),
            (None, _) => {}
        }
        rest
    }
}
