//! Bodies of requests to engines and of their responses.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;

use super::connection::Connection;
use super::pool::{Origin, Pool};

/// Request body: complete bytes that are cheap to clone for a retry.
pub type RequestBody = Full<Bytes>;

/// A streaming response body. It drives its own connection, which is returned to the pool at the end of the body;
/// dropping the body earlier closes the connection.
pub struct AnswerBody {
    incoming: Incoming,
    lent: Option<Lent>,
}

/// A connection taken from the pool.
struct Lent {
    connection: Box<Connection>,
    origin: Origin,
    home: Arc<Pool>,
}

impl std::fmt::Debug for AnswerBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AnswerBody").finish_non_exhaustive()
    }
}

impl AnswerBody {
    pub(super) fn new(incoming: Incoming, connection: Box<Connection>, origin: Origin, home: Arc<Pool>) -> Self {
        Self { incoming, lent: Some(Lent { connection, origin, home }) }
    }

    /// Returns the connection to the pool immediately if the body is empty.
    pub(super) fn settle(&mut self, cx: &mut Context<'_>) {
        if self.incoming.is_end_stream() {
            self.give_back(cx);
        }
    }

    /// Creates the body of a response on a shared connection, which the HTTP/2 client drives.
    pub(super) fn shared(incoming: Incoming) -> Self {
        Self { incoming, lent: None }
    }

    /// Returns the connection to the pool once the response is complete.
    fn give_back(&mut self, cx: &mut Context<'_>) {
        let Some(Lent { mut connection, origin, home }) = self.lent.take() else { return };
        if connection.is_usable(cx) {
            home.put(origin, connection);
        } else {
            home.note_stray(&connection);
        }
    }

    fn poll_incoming(&mut self, cx: &mut Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let polled = Pin::new(&mut self.incoming).poll_frame(cx);
        match &polled {
            Poll::Pending => {}
            Poll::Ready(Some(Err(_))) => {
                if let Some(lent) = self.lent.take() {
                    lent.home.note_broken();
                }
            }
            // A reader that knows the length does not poll after the last byte, so detect the end of the stream here.
            Poll::Ready(Some(Ok(_))) if !self.incoming.is_end_stream() => {}
            Poll::Ready(_) => self.give_back(cx),
        }
        polled
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let this = self.get_mut();
        if let Poll::Ready(frame) = this.poll_incoming(cx) {
            return Poll::Ready(frame);
        }
        if let Some(lent) = this.lent.as_mut()
            && lent.connection.drive(cx)
        {
            // The connection has closed and delivered all of its data.
            lent.home.note_stray(&lent.connection);
            this.lent = None;
        }
        this.poll_incoming(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}
