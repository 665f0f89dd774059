//! Searches response chunks for the rank that ran the request, the engine's prompt token count, and reported failures.

use std::sync::Arc;

use semmoe_engines::failures::Failure;
use semmoe_engines::pieces::{prompt_tokens, rank_in_meta};
use semmoe_engines::{Carrier, Dialect, Route};
use semmoe_tables::RankId;
use semmoe_text::Shapes;

use super::reports::Reports;
use super::{DataPlane, Ticket};
use crate::backends::Backend;

/// The cause shown for a backend whose health route reports a dead core.
pub(super) const CORE_IS_DEAD: &str = "its health route reports that the engine core is dead";

/// Number of chunks searched for the rank, which is usually in the first.
const EVENTS_CHECKED: u8 = 8;

/// The rank on which a pinned request should run.
pub(crate) struct Expected {
    route: Route,
    /// The rank in the engine's numbering.
    pub(crate) wire_rank: u32,
    /// Whether the response's metadata names the rank, in dialects that support it.
    pub(crate) in_meta: bool,
    checks_left: u8,
}

impl Expected {
    /// Returns `None` if there is no pin to verify.
    pub(crate) fn new(dialect: &Dialect, route: Route, rank: RankId) -> Option<Self> {
        match dialect.carrier(route) {
            Some(Carrier::Header | Carrier::Field(_)) => {
                let in_meta = route == Route::Generate;
                Some(Self { route, wire_rank: dialect.wire_rank(rank), in_meta, checks_left: EVENTS_CHECKED })
            }
            Some(Carrier::Url) | None => None,
        }
    }
}

/// The facts still to be found in one response.
pub(crate) struct Watch {
    pub(crate) backend: Arc<Backend>,
    pub(crate) rank: Option<Expected>,
    /// The gateway's own prompt token count.
    pub(crate) counted: Option<u64>,
    /// Shapes of the chat.
    pub(crate) shapes: Shapes,
    /// Where the response would report an engine failure.
    pub(crate) reports: Reports,
    /// The failure that the engine reported in this response.
    pub(crate) failure: Option<Failure>,
}

impl Watch {
    pub(crate) fn read(&mut self, plane: &DataPlane, piece: &[u8]) {
        self.find_rank(plane, piece);
        let Some(counted) = self.counted else { return };
        if let Some(reported) = prompt_tokens(piece) {
            plane.backends.note_count(&self.backend, self.shapes, counted, reported);
            self.counted = None;
        }
    }

    /// Searches complete events, or a chunk of a document, for a failure.
    pub(crate) fn find_failure(&mut self, ticket: &mut Ticket, piece: &[u8], is_last: bool) {
        if self.failure.is_some() {
            return;
        }
        self.failure = self.reports.find(piece, is_last);
        if let Some(failure) = self.failure {
            note_failure(ticket, &self.backend, failure);
        }
    }

    fn find_rank(&mut self, plane: &DataPlane, piece: &[u8]) {
        let Some(expected) = &mut self.rank else { return };
        let found = rank_in_meta(piece);
        expected.checks_left -= 1;
        let (route, wire_rank, done) = (expected.route, expected.wire_rank, expected.checks_left == 0);
        if let Some(found) = found {
            plane.backends.note_pin(&self.backend, route, wire_rank, found);
        }
        if done || found.is_some() {
            self.rank = None;
        }
    }
}

/// Records that an engine failed this request, as evidence to be weighed against other backends. A dead engine receives
/// no more requests.
pub(crate) fn note_failure(ticket: &mut Ticket, backend: &Arc<Backend>, failure: Failure) {
    ticket.plane.metrics.faults.engine_failed(&backend.name, failure.label());
    if failure == Failure::Dead {
        ticket.failed(backend);
        ticket.plane.backends.mark_unhealthy(backend, CORE_IS_DEAD.to_owned());
        return;
    }
    ticket.erred(backend);
    tracing::warn!(
        backend = backend.name,
        failure = failure.label(),
        "the engine failed a request that it had accepted"
    );
    backend.suspect();
}
