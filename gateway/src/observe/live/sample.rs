//! A sampled request, for which the engine is to return routed experts.

use std::sync::Arc;

use semmoe_engines::routed::{Asking, Place};

use super::Live;
use super::seen::{MISSING, Observation, Seen};

/// A sampled request, for which the engine is to return routed experts. It is counted exactly once: by its outcome, or
/// as `unfinished` if it is dropped first.
pub(crate) struct Sample {
    live: Arc<Live>,
    seen: Option<Seen>,
    pub(crate) asking: Asking,
    /// Maximum size of a response that is buffered.
    pub(super) limit_bytes: usize,
}

impl Sample {
    pub(crate) fn new(live: &Arc<Live>, seen: Seen, asking: Asking, limit_bytes: usize) -> Self {
        Self { live: Arc::clone(live), seen: Some(seen), asking, limit_bytes }
    }

    /// Records why the response is not evaluated.
    pub(crate) fn give_up(mut self, outcome: &'static str) {
        // vLLM without its flag does not reject the field; its responses just lack the routed experts.
        if outcome == MISSING
            && matches!(self.asking.place, Place::Choices { .. })
            && let Some(seen) = self.seen.as_ref().filter(|seen| !seen.backend.tells_unasked())
        {
            self.live.note_refusal(&seen.backend, "omits the routed experts that requests ask for");
        }
        self.count(outcome);
    }

    /// Records that the engine refused a sampled request, which was then sent unsampled. If the engine accepted it
    /// unsampled, it is not sampled again until the next probe; if it refused both, the request itself was at fault.
    pub(crate) fn sent_without(self, taken: bool) {
        if let Some(seen) = self.seen.as_ref().filter(|_| taken) {
            self.live.note_refusal(&seen.backend, "refuses requests that ask for routed experts");
        }
        self.give_up(if taken { "refused" } else { "failed" });
    }

    /// Submits the response or event that contains the routed experts.
    pub(super) fn submit(mut self, answer: bytes::Bytes) {
        let Some(seen) = self.seen.take() else { return };
        let backend = Arc::clone(&seen.backend);
        if matches!(self.asking.place, Place::Choices { .. }) {
            self.live.note_unasked(&backend);
        }
        if self.live.queue.try_send(Observation { seen, answer }).is_err() {
            self.live.metrics.sampled(&backend.name, "queue_full");
        }
    }

    fn count(&mut self, outcome: &'static str) {
        if let Some(seen) = self.seen.take() {
            self.live.metrics.sampled(&seen.backend.name, outcome);
        }
    }
}

impl Drop for Sample {
    fn drop(&mut self) {
        self.count("unfinished");
    }
}
