//! The body of an answer on its way to the client: frame by frame, with back-pressure, watched.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use semmoe_engines::http::AnswerBody;
use semmoe_engines::sse::Events;
use serde_json::json;
use tokio::time::{Instant, Sleep, sleep};

use crate::live::Edit;

use super::ticket::Ticket;
use super::watch::Watch;

/// An answer ends in the middle. Where it has no place for an error the connection to the client is closed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BrokenOff {
    #[error("backend '{backend}' broke off: {cause}")]
    Backend { backend: String, cause: String },
    #[error("the gateway shuts down")]
    Closing,
}

impl BrokenOff {
    /// Type and code of the error event.
    fn kind(&self) -> (&'static str, &'static str) {
        match self {
            Self::Backend { .. } => ("upstream_error", "backend_broke_off"),
            Self::Closing => ("server_error", "shutting_down"),
        }
    }
}

/// Relays an engine's body. Dropping it closes the connection to the engine, so that a client that goes away is seen
/// there at once; its ticket counts the request out at the last byte, at a failure, or at that drop.
pub(crate) struct RelayBody {
    upstream: AnswerBody,
    /// Boundaries, for server-sent events.
    events: Option<Events>,
    /// Cuts out what only a sampled request asked for.
    edit: Option<Edit>,
    idle: Pin<Box<Sleep>>,
    idle_limit: Duration,
    /// The clock of `idle` runs. It starts with the first look that finds nothing, so that a slow client, who is not
    /// looked for while he reads, never makes the engine look silent.
    waiting: bool,
    status: u16,
    watch: Watch,
    ticket: Ticket,
    ended: bool,
}

impl RelayBody {
    pub(crate) fn new(
        upstream: AnswerBody,
        events: bool,
        edit: Option<Edit>,
        idle_limit: Duration,
        status: u16,
        watch: Watch,
        ticket: Ticket,
    ) -> Self {
        let mut body = Self {
            upstream,
            events: events
                .then(|| edit.as_ref().map_or_else(Events::new, |edit| Events::with_limit(edit.limit_bytes()))),
            edit,
            idle: Box::pin(sleep(idle_limit)),
            idle_limit,
            waiting: false,
            status,
            watch,
            ticket,
            ended: false,
        };
        body.finish_at_end();
        body
    }

    /// A server that knows the length does not ask for more after the last byte, so the end is looked for here.
    fn finish_at_end(&mut self) {
        if self.upstream.is_end_stream() {
            self.ticket.complete(&self.watch.backend, self.status);
        }
    }

    fn data(&mut self, data: Bytes) -> Option<Frame<Bytes>> {
        self.ticket.computed();
        self.watch.look(self.ticket.core(), &data);
        let now = match &mut self.events {
            None => data,
            Some(events) => events.push(data),
        };
        let now = match &mut self.edit {
            None => now,
            Some(edit) => edit.push(now, self.events.as_ref().is_none_or(Events::is_at_boundary)),
        };
        self.finish_at_end();
        (!now.is_empty()).then(|| Frame::data(now))
    }

    fn end(&mut self) -> Option<Frame<Bytes>> {
        self.ended = true;
        self.ticket.complete(&self.watch.backend, self.status);
        let rest = self.events.as_mut().map(Events::rest).unwrap_or_default();
        let rest = match &mut self.edit {
            None => rest,
            Some(edit) => edit.end(rest),
        };
        (!rest.is_empty()).then(|| Frame::data(rest))
    }

    /// The engine died or fell silent: an error event where one fits, or else an end that nobody takes for a good one.
    fn fail(&mut self, cause: String) -> Result<Frame<Bytes>, BrokenOff> {
        self.ticket.failed(&self.watch.backend);
        self.watch.backend.suspect();
        let backend = self.watch.backend.name.clone();
        tracing::warn!(backend, cause, "answer broke off");
        self.break_off(BrokenOff::Backend { backend, cause }, 502)
    }

    fn break_off(&mut self, broken: BrokenOff, code: u16) -> Result<Frame<Bytes>, BrokenOff> {
        self.ended = true;
        self.ticket.finish(code);
        if !self.events.as_mut().is_some_and(Events::cut_off) {
            return Err(broken);
        }
        let (kind, code) = broken.kind();
        let error = json!({
            "message": broken.to_string(), "type": kind, "param": null, "code": code,
            "request_id": self.ticket.id().as_str(),
        });
        Ok(Frame::data(Bytes::from(format!("data: {}\n\n", json!({ "error": error })))))
    }
}

impl Body for RelayBody {
    type Data = Bytes;
    type Error = BrokenOff;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        let this = self.get_mut();
        loop {
            if this.ended {
                return Poll::Ready(None);
            }
            let Poll::Ready(next) = Pin::new(&mut this.upstream).poll_frame(cx) else {
                // Asked at the end of a drain, when every connection is polled once more.
                if this.ticket.core().is_closing() {
                    return Poll::Ready(Some(this.break_off(BrokenOff::Closing, 503)));
                }
                if !this.waiting {
                    this.waiting = true;
                    this.idle.as_mut().reset(Instant::now() + this.idle_limit);
                }
                ready!(this.idle.as_mut().poll(cx));
                return Poll::Ready(Some(this.fail(format!("it sent nothing for {:?}", this.idle_limit))));
            };
            this.waiting = false;
            let frame = match next {
                None => return Poll::Ready(this.end().map(Ok)),
                Some(Err(error)) => return Poll::Ready(Some(this.fail(error.to_string()))),
                Some(Ok(frame)) => frame,
            };
            match frame.into_data() {
                Ok(data) => {
                    if let Some(frame) = this.data(data) {
                        return Poll::Ready(Some(Ok(frame)));
                    }
                }
                Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended || (self.events.is_none() && self.edit.is_none() && self.upstream.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        match (&self.events, &self.edit) {
            (None, None) => self.upstream.size_hint(),
            // Held-back bytes, an error event and what is cut out are not in the engine's count.
            _ => SizeHint::default(),
        }
    }
}
