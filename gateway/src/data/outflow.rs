//! Tracks bytes in transit to a client: bounded while the client does not read them, and subtracted once it does.
//!
//! hyper queues up to 16 frames or 400 kB of a response before it writes. Here a body is polled for its next frame only
//! while few bytes are unsent, so that back-pressure reaches the engine at once. Over HTTP/1.1 a connection sends one
//! response at a time, and its socket reports the sent bytes. Over HTTP/2 each frame reports when it is dropped: by
//! then it has been written, or never will be.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use http_body::{Body, Frame, SizeHint};

/// No further frame is produced while this many bytes are unsent.
const FULL_BYTES: usize = 4 << 10;
/// Frames up to this size are copied while others are unsent, because even a small frame keeps an entire read buffer
/// alive.
const COPIED_BYTES: usize = 2 << 10;

tokio::task_local! {
    /// The outflow of the HTTP/2 stream whose task is running.
    pub(crate) static OF_STREAM: Arc<Outflow>;
}

/// The outflow state of an HTTP/1.1 connection, or of one HTTP/2 stream.
#[derive(Default)]
pub(crate) struct Outflow {
    /// Number of running requests: from their head to the last frame of their response.
    running: AtomicUsize,
    /// Whether there has been a request.
    used: AtomicBool,
    /// Bytes in frames that have not been sent to the client yet.
    unsent: AtomicUsize,
    /// Incremented whenever one of the stream's frames is sent.
    sent: AtomicU32,
    /// The body resumes once fewer bytes than this are unsent; 0 if it is not waiting.
    wanted: AtomicUsize,
    body: AtomicWaker,
}

impl Outflow {
    /// Registers a request as running until the guard is dropped.
    pub(crate) fn run(self: &Arc<Self>) -> Running {
        self.running.fetch_add(1, Ordering::Relaxed);
        // Most calls change nothing and leave the cache line shared.
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
        Running(Arc::clone(self))
    }

    /// Whether no request is running and no response remains to be sent.
    pub(crate) fn is_idle(&self) -> bool {
        self.running.load(Ordering::Relaxed) == 0 && self.unsent.load(Ordering::Relaxed) == 0
    }

    /// Whether there has been no request yet.
    pub(crate) fn is_unused(&self) -> bool {
        !self.used.load(Ordering::Relaxed)
    }

    pub(crate) fn has_unsent(&self) -> bool {
        self.unsent.load(Ordering::Relaxed) > 0
    }

    /// A stream's progress counter, which changes whenever data is sent.
    pub(crate) fn progress(&self) -> u32 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Records that the client's socket accepted `bytes`.
    pub(crate) fn sent(&self, bytes: usize) {
        // Response heads and chunk framing are also sent, but were not counted as unsent.
        let take = |unsent: usize| Some(unsent.saturating_sub(bytes));
        let before = self.unsent.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).unwrap_or(0);
        if before.saturating_sub(bytes) < self.wanted.load(Ordering::SeqCst) {
            self.wanted.store(0, Ordering::SeqCst);
            self.body.wake();
        }
    }

    /// Ready while fewer than `limit` bytes are unsent.
    fn below(&self, limit: usize, cx: &Context<'_>) -> Poll<()> {
        if self.unsent.load(Ordering::SeqCst) < limit {
            return Poll::Ready(());
        }
        self.body.register(cx.waker());
        self.wanted.store(limit, Ordering::SeqCst);
        // Check again: another thread may have sent the remaining bytes meanwhile.
        match self.unsent.load(Ordering::SeqCst) < limit {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    }
}

/// A running request.
pub(crate) struct Running(Arc<Outflow>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An HTTP/2 frame.
struct Unsent {
    data: Bytes,
    outflow: Arc<Outflow>,
}

impl AsRef<[u8]> for Unsent {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

impl Drop for Unsent {
    fn drop(&mut self) {
        self.outflow.sent.fetch_add(1, Ordering::Relaxed);
        self.outflow.sent(self.data.len());
    }
}

/// A response body, paced by its client.
pub(crate) struct Paced<B> {
    body: B,
    outflow: Arc<Outflow>,
    /// Only set over HTTP/1.1.
    running: Option<Running>,
    ended: bool,
}

impl<B> Paced<B> {
    /// Paces a body. `running` is set over HTTP/1.1, where this is the connection's only request.
    pub(crate) fn new(body: B, running: Option<Running>) -> Self {
        let outflow = match &running {
            Some(Running(outflow)) => Arc::clone(outflow),
            None => OF_STREAM.try_with(Arc::clone).unwrap_or_default(),
        };
        Self { body, outflow, running, ended: false }
    }

    fn is_stream(&self) -> bool {
        self.running.is_none()
    }

    fn hand_out(&self, data: Bytes) -> Bytes {
        let before = self.outflow.unsent.fetch_add(data.len(), Ordering::SeqCst);
        let data = if before > 0 && data.len() <= COPIED_BYTES { Bytes::copy_from_slice(&data) } else { data };
        match self.is_stream() {
            true => Bytes::from_owner(Unsent { data, outflow: Arc::clone(&self.outflow) }),
            false => data,
        }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for Paced<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = self.get_mut();
        if !this.ended {
            ready!(this.outflow.below(FULL_BYTES, cx));
            match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    return Poll::Ready(Some(Ok(match frame.into_data() {
                        Ok(data) => Frame::data(this.hand_out(data)),
                        Err(trailers) => trailers,
                    })));
                }
                None => this.ended = true,
                error => return Poll::Ready(error),
            }
        }
        // Delay a stream's end until the rest is sent: until then its task can detect that the client has stalled.
        if this.is_stream() {
            ready!(this.outflow.below(1, cx));
        }
        Poll::Ready(None)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream() && !(self.is_stream() && self.outflow.has_unsent())
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
