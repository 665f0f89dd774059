//! A response body on its way to the client: inspected, and relayed frame by frame with back-pressure.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use semmoe_engines::SharedError;
use semmoe_engines::sse::Events;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::backends::{Form, RequestError};
use crate::observe::Edit;

use super::opening::Upstream;
use super::{Ticket, Watch};

/// Events are coalesced into one frame up to this size: as much as engines write at once, and little to copy.
const GATHERED_BYTES: usize = 16 << 10;

/// Relays an engine's body. Dropping it closes the connection to the engine, which thus notices at once that the client
/// is gone. Its ticket ends the request at the last byte, at a failure, or on drop.
pub(crate) struct RelayBody {
    upstream: Box<Upstream>,
    /// Event boundaries, for server-sent events.
    events: Option<Events>,
    /// Removes routed experts that only sampling requested.
    edit: Option<Edit>,
    silence: Silence,
    status: u16,
    watch: Watch,
    ticket: Ticket,
    /// Ends the response without an error event, one poll after the failure.
    broken: Option<Box<RequestError>>,
    ended: bool,
}

impl RelayBody {
    pub(crate) fn new(
        upstream: Box<Upstream>,
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
                .then(|| edit.as_ref().map_or_else(Events::default, |edit| Events::with_limit(edit.limit_bytes()))),
            edit,
            silence: Silence { limit: idle_limit, deadline: None, clock: None },
            status,
            watch,
            ticket,
            broken: None,
            ended: false,
        };
        body.finish_at_end();
        body
    }

    /// A server that knows the length does not poll after the last byte, so check for the end here.
    fn finish_at_end(&mut self) {
        if self.upstream.is_end_stream() {
            self.complete();
        }
    }

    /// Records that the backend's last byte was relayed. A response that ended in an engine failure counts as broken
    /// off.
    fn complete(&mut self) {
        let code = if self.watch.failure.is_some() { self.status.max(502) } else { self.status };
        self.ticket.complete(&self.watch.backend, code);
    }

    fn data(&mut self, data: Bytes) -> Bytes {
        let is_good = (200..300).contains(&self.status);
        if is_good {
            self.watch.backend.hear();
        }
        self.ticket.piece();
        self.ticket.record.sent(data.len());
        self.watch.read(&self.ticket.plane, &data);
        let now = match &mut self.events {
            None => data,
            Some(events) => events.push(data),
        };
        if is_good {
            self.ticket.note_piece(&now, self.events.as_ref().map(Events::data_lines));
            self.watch.find_failure(&mut self.ticket, &now, self.upstream.is_end_stream());
        }
        let now = match &mut self.edit {
            None => now,
            Some(edit) => edit.push(now, self.events.as_ref().is_none_or(Events::is_at_boundary)),
        };
        self.finish_at_end();
        now
    }

    fn end(&mut self) -> Bytes {
        self.ended = true;
        self.complete();
        let rest = self.events.as_mut().map(Events::rest).unwrap_or_default();
        match &mut self.edit {
            None => rest,
            Some(edit) => edit.end(rest),
        }
    }

    /// Handles an engine that died or fell silent: sends an error event if the stream allows one, otherwise visibly
    /// breaks off the response.
    fn fail(&mut self, source: SharedError) -> Result<Frame<Bytes>, RequestError> {
        self.ticket.erred(&self.watch.backend);
        self.watch.backend.suspect();
        let backend = self.watch.backend.name.clone();
        tracing::warn!(backend, cause = %source, "answer broke off");
        self.break_off(RequestError::BrokeOff { backend, source })
    }

    /// Ends the response prematurely. If it has no place for an error, the client's connection is closed.
    fn break_off(&mut self, broken: RequestError) -> Result<Frame<Bytes>, RequestError> {
        self.ended = true;
        self.ticket.finish(broken.status().as_u16());
        if !self.events.as_mut().is_some_and(Events::cut_off) {
            return Err(broken);
        }
        let form = Form::of(self.ticket.record.route);
        let error = broken.body_with(&self.ticket.record.id, form);
        Ok(Frame::data(Bytes::from(form.event(&error))))
    }

    /// Returns the next frame. Small events available together are combined, because every frame costs at least one
    /// system call.
    fn poll_gathered(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, RequestError>>> {
        let mut gathered = Gathered::default();
        while !self.ended && gathered.has_room() {
            let next = match self.upstream.poll_frame(cx) {
                Poll::Pending if !gathered.is_empty() => break,
                // Reached at the end of a drain, when every connection is polled once more.
                Poll::Pending if self.ticket.plane.is_closing() => {
                    return Poll::Ready(Some(self.break_off(RequestError::Closing)));
                }
                Poll::Pending => {
                    ready!(self.silence.poll(cx));
                    return Poll::Ready(Some(
                        self.fail(format!("it sent nothing for {:?}", self.silence.limit).into()),
                    ));
                }
                Poll::Ready(next) => next,
            };
            self.silence.deadline = None;
            match next {
                None => gathered.add(self.end()),
                Some(Err(error)) if gathered.is_empty() => return Poll::Ready(Some(self.fail(error.into()))),
                Some(Err(error)) => {
                    self.upstream.put_back(Err(error));
                    break;
                }
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => gathered.add(self.data(data)),
                    Err(trailers) if gathered.is_empty() => return Poll::Ready(Some(Ok(trailers))),
                    Err(trailers) => {
                        self.upstream.put_back(Ok(trailers));
                        break;
                    }
                },
            }
            if self.events.is_none() && !gathered.is_empty() {
                break;
            }
        }
        Poll::Ready(gathered.whole().map(|data| Ok(Frame::data(data))))
    }
}

impl Body for RelayBody {
    type Data = Bytes;
    type Error = RequestError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, RequestError>>> {
        let this = self.get_mut();
        if let Some(broken) = this.broken.take() {
            return Poll::Ready(Some(Err(*broken)));
        }
        match this.poll_gathered(cx) {
            // hyper discards data that it has not written yet, even the head, so let it write that first.
            Poll::Ready(Some(Err(broken))) => {
                this.broken = Some(Box::new(broken));
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            polled => polled,
        }
    }

    fn is_end_stream(&self) -> bool {
        if self.broken.is_some() {
            return false;
        }
        self.ended || (self.events.is_none() && self.edit.is_none() && self.upstream.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        match (&self.events, &self.edit) {
            (None, None) => self.upstream.size_hint(),
            // The engine's length does not account for held-back bytes, an error event or removed experts.
            _ => SizeHint::default(),
        }
    }
}

/// Measures an engine's silence. It starts at the first poll that finds no data: while a slow client reads, nothing is
/// polled, so it never makes the engine look silent.
struct Silence {
    limit: Duration,
    /// When the silence becomes too long; `None` while data arrives.
    deadline: Option<Instant>,
    /// Created when first needed and reset only when it fires: most polls that find no data cost no timer.
    clock: Option<Pin<Box<Sleep>>>,
}

impl Silence {
    /// Ready when no data has arrived for too long.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let deadline = *self.deadline.get_or_insert_with(|| Instant::now() + self.limit);
        let clock = self.clock.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        loop {
            ready!(clock.as_mut().poll(cx));
            if clock.deadline() >= deadline {
                return Poll::Ready(());
            }
            clock.as_mut().reset(deadline);
        }
    }
}

/// Chunks to be sent together. A single one is passed on without a copy.
#[derive(Default)]
struct Gathered {
    first: Bytes,
    all: BytesMut,
}

impl Gathered {
    fn is_empty(&self) -> bool {
        self.first.is_empty() && self.all.is_empty()
    }

    fn has_room(&self) -> bool {
        self.first.len().max(self.all.len()) < GATHERED_BYTES
    }

    fn add(&mut self, piece: Bytes) {
        if piece.is_empty() {
            return;
        }
        if self.is_empty() {
            self.first = piece;
            return;
        }
        if self.all.is_empty() {
            self.all.reserve(GATHERED_BYTES);
            self.all.extend_from_slice(&std::mem::take(&mut self.first));
        }
        self.all.extend_from_slice(&piece);
    }

    fn whole(self) -> Option<Bytes> {
        let whole = if self.all.is_empty() { self.first } else { self.all.freeze() };
        (!whole.is_empty()).then_some(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_piece_is_passed_on_and_several_are_joined_in_order() {
        assert_eq!(Gathered::default().whole(), None);
        let piece = Bytes::from_static(b"data: 1\n\n");
        let mut gathered = Gathered::default();
        for piece in [Bytes::new(), piece.clone(), Bytes::new()] {
            gathered.add(piece);
        }
        assert_eq!(gathered.whole().map(|whole| whole.as_ptr()), Some(piece.as_ptr()));
        let mut gathered = Gathered::default();
        let mut added = Vec::new();
        for piece in (0..).map(|number| Bytes::from(format!("data: {number}\n\n"))) {
            if !gathered.has_room() {
                break;
            }
            added.extend_from_slice(&piece);
            gathered.add(piece);
        }
        assert!((GATHERED_BYTES..GATHERED_BYTES + 32).contains(&added.len()));
        assert_eq!(gathered.whole().as_deref(), Some(&added[..]));
    }

    #[tokio::test]
    async fn silence_counts_from_the_last_piece() {
        let limit = Duration::from_millis(20);
        let mut silence = Silence { limit, deadline: None, clock: None };
        let _ = std::future::poll_fn(|cx| Poll::Ready(silence.poll(cx))).await;
        tokio::time::sleep(limit / 2).await;
        // Data arrived; the timer keeps its old deadline until it fires.
        silence.deadline = None;
        let last = Instant::now();
        std::future::poll_fn(|cx| silence.poll(cx)).await;
        assert!(last.elapsed() >= limit);
    }
}
