//! Handles clients that do not read their responses. Their connections or streams are ended, because their requests
//! occupy a rank; until then the memory held for them is counted.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

use crate::data::outflow::Outflow;
use crate::observe::MemoryMetrics;

/// Memory charged for each unread response: an upper bound on hyper's buffers and those of the engine's connection.
const HELD_BYTES: usize = 128 << 10;

/// The memory held by responses whose clients have stalled.
pub(crate) struct AnswerMemory {
    limit_bytes: AtomicUsize,
    metrics: MemoryMetrics,
}

impl AnswerMemory {
    pub(crate) fn new(limit_bytes: usize, metrics: MemoryMetrics) -> Self {
        Self { limit_bytes: AtomicUsize::new(limit_bytes), metrics }
    }

    /// Sets the limit for later responses.
    pub(crate) fn set_limit(&self, limit_bytes: usize) {
        self.limit_bytes.store(limit_bytes, Ordering::Relaxed);
    }

    /// Number of bytes currently held.
    pub(crate) fn held_bytes(&self) -> usize {
        self.metrics.held_bytes()
    }
}

/// One response's part of that memory, while it holds any.
pub(crate) struct Holding {
    memory: Arc<AnswerMemory>,
    holds: bool,
}

impl Holding {
    pub(crate) fn new(memory: Arc<AnswerMemory>) -> Self {
        Self { memory, holds: false }
    }

    /// Charges the memory of a response whose client stalled; returns false if the limit is reached.
    pub(crate) fn take(&mut self) -> bool {
        self.holds =
            self.holds || self.memory.metrics.hold(HELD_BYTES, self.memory.limit_bytes.load(Ordering::Relaxed));
        self.holds
    }

    /// Returns the memory once the client reads again.
    pub(crate) fn give_back(&mut self) {
        if std::mem::take(&mut self.holds) {
            self.memory.metrics.give_back(HELD_BYTES);
        }
    }

    /// Records that the client read nothing for too long.
    pub(crate) fn note_late(&self) {
        self.memory.metrics.closed("time");
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// A socket whose writes fail once none has been accepted for too long. The timer runs only while writes are pending,
/// so a socket that accepts everything at once never starts one.
pub(crate) struct Stalling<S> {
    socket: S,
    limit: Duration,
    clock: Option<Pin<Box<Sleep>>>,
    waiting: bool,
    holding: Holding,
    /// Notified of sent bytes, on connections with one response at a time.
    outflow: Option<Arc<Outflow>>,
}

impl<S> Stalling<S> {
    pub(crate) fn new(socket: S, limit: Duration, holding: Holding, outflow: Option<Arc<Outflow>>) -> Self {
        Self { socket, limit, clock: None, waiting: false, holding, outflow }
    }

    fn track<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            if std::mem::take(&mut self.waiting) {
                self.holding.give_back();
            }
            return written;
        }
        let limit = self.limit;
        let clock = self.clock.get_or_insert_with(|| Box::pin(sleep(limit)));
        if !self.waiting {
            self.waiting = true;
            clock.as_mut().reset(Instant::now() + limit);
            if !self.holding.take() {
                let error = io::Error::new(io::ErrorKind::OutOfMemory, "too many clients do not read their responses");
                return Poll::Ready(Err(error));
            }
        }
        if clock.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        self.holding.note_late();
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read its response")))
    }

    fn wrote(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let (Some(outflow), Poll::Ready(Ok(bytes))) = (&self.outflow, &written) {
            outflow.sent(*bytes);
        }
        self.track(cx, written)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Stalling<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Stalling<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.socket).poll_write(cx, bytes);
        this.wrote(cx, written)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let flushed = Pin::new(&mut this.socket).poll_flush(cx);
        this.track(cx, flushed)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let shut = Pin::new(&mut this.socket).poll_shutdown(cx);
        this.track(cx, shut)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.socket).poll_write_vectored(cx, slices);
        this.wrote(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }
}

/// Maximum time between two checks of an HTTP/2 stream.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Ends an HTTP/2 stream whose client has stalled, even if its socket still accepts bytes. The stream's task polls it
/// at the end of each poll; the timer is reset only when it fires.
pub(crate) struct StalledStream {
    limit: Duration,
    clock: Option<Pin<Box<Sleep>>>,
    progress: u32,
    /// Number of consecutive checks between which nothing was read.
    still: u32,
    holding: Holding,
}

impl StalledStream {
    pub(crate) fn new(limit: Duration, holding: Holding) -> Self {
        Self { limit, clock: None, progress: 0, still: 0, holding }
    }

    /// Ready when the stream must end.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>, outflow: &Outflow) -> Poll<()> {
        loop {
            if !outflow.has_unsent() {
                self.still = 0;
                self.holding.give_back();
                return Poll::Pending;
            }
            let interval = CHECK_INTERVAL.min(self.limit / 8);
            let clock = self.clock.get_or_insert_with(|| Box::pin(sleep(interval)));
            if clock.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            clock.as_mut().reset(Instant::now() + interval);
            let progress = outflow.progress();
            if std::mem::replace(&mut self.progress, progress) != progress {
                self.still = 0;
                self.holding.give_back();
                continue;
            }
            self.still += 1;
            if interval * self.still >= self.limit {
                self.holding.note_late();
                return Poll::Ready(());
            }
            if !self.holding.take() {
                return Poll::Ready(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    fn memory(limit_bytes: usize) -> Arc<AnswerMemory> {
        Arc::new(AnswerMemory::new(limit_bytes, MemoryMetrics::default()))
    }

    #[tokio::test]
    async fn only_who_takes_nothing_is_ended() {
        let (ours, mut theirs) = duplex(16);
        let memory = memory(HELD_BYTES);
        let mut ours = Stalling::new(ours, Duration::from_millis(20), Holding::new(Arc::clone(&memory)), None);
        let reader = tokio::spawn(async move {
            let mut taken = 0;
            // Slow, but never idle for the whole limit.
            while taken < 64 {
                taken += theirs.read(&mut [0; 8]).await.unwrap();
                tokio::task::yield_now().await;
            }
            theirs
        });
        ours.write_all(&[0; 64]).await.unwrap();
        assert_eq!(memory.held_bytes(), 0);
        let _still_open = reader.await.unwrap();
        let error = ours.write_all(&[0; 64]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(ours);
        assert_eq!(memory.held_bytes(), 0);
    }

    #[tokio::test]
    async fn who_takes_nothing_holds_memory_to_a_limit() {
        let memory = memory(2 * HELD_BYTES + 1);
        let (mut clients, mut held) = (Vec::new(), Vec::new());
        for number in 0..3 {
            let (ours, theirs) = duplex(16);
            clients.push(theirs);
            let mut ours = Stalling::new(ours, Duration::from_secs(60), Holding::new(Arc::clone(&memory)), None);
            ours.write_all(&[0; 16]).await.unwrap();
            let written = std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut ours).poll_write(cx, &[0]))).await;
            match written {
                Poll::Ready(Err(error)) => assert_eq!((number, error.kind()), (2, io::ErrorKind::OutOfMemory)),
                other => assert!(other.is_pending() && number < 2, "{number}: {other:?}"),
            }
            held.push(ours);
        }
        assert_eq!(memory.held_bytes(), 2 * HELD_BYTES);
        drop(held);
        assert_eq!(memory.held_bytes(), 0);
    }
}
