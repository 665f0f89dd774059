//! A connection to an engine, polled by the task that uses it.
//!
//! hyper requires each connection to be polled, usually by a separate task, so that every request and every piece of a
//! response crosses between tasks. Here the future that sends a request polls the connection itself, and later the
//! response body does. An idle connection is not polled; [`Connection::is_usable`] checks it before reuse.

use std::error::Error as _;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use ::http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf, Take};

use super::RequestBody;

/// The transport of a connection.
pub(super) trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// A stream that limits the size of reads.
struct Sipping(Take<Box<dyn Stream>>);

impl AsyncRead for Sipping {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Self(stream) = self.get_mut();
        stream.set_limit(SIP_BYTES);
        Pin::new(stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Sipping {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(self.get_mut().0.get_mut()).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.get_mut().0.get_mut()).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.get_mut().0.get_mut()).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(self.get_mut().0.get_mut()).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.get_ref().is_write_vectored()
    }
}

type Driver = http1::Connection<TokioIo<Sipping>, RequestBody>;

/// Maximum bytes per read. hyper doubles its buffer whenever a read fills it, up to 400 kB, and allocates three such
/// buffers for a slow reader; this limit is one byte short of filling a 16 KiB buffer.
const SIP_BYTES: u64 = (16 << 10) - 1;

pub(super) struct Connection {
    sender: SendRequest<RequestBody>,
    /// `None` once the connection has ended.
    driver: Option<Driver>,
    /// Whether the connection ended because the engine sent bytes outside any response. Meaningful only while no
    /// exchange is in progress.
    pub(super) stray: bool,
}

impl Connection {
    pub(super) async fn handshake(stream: Box<dyn Stream>) -> hyper::Result<Self> {
        let (sender, driver) = http1::handshake(TokioIo::new(Sipping(stream.take(0)))).await?;
        Ok(Self { sender, driver: Some(driver), stray: false })
    }

    /// Drives I/O; returns true once the connection has ended.
    pub(super) fn drive(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(driver) = &mut self.driver else { return true };
        match Pin::new(driver).poll(cx) {
            Poll::Pending => false,
            Poll::Ready(ended) => {
                self.stray = ended.is_err_and(|error| is_stray(&error));
                // The request or the body receives the error, at the latest when the driver is dropped.
                self.driver = None;
                true
            }
        }
    }

    /// Returns whether the last exchange is complete and the engine has kept the connection open.
    pub(super) fn is_usable(&mut self, cx: &mut Context<'_>) -> bool {
        !self.drive(cx) && self.sender.is_ready()
    }

    /// Sends a request and returns once the response head arrives. The error contains the request if no part of it was
    /// sent.
    pub(super) async fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> Result<Response<Incoming>, TrySendError<Request<RequestBody>>> {
        let answer = self.sender.try_send_request(request);
        let mut answer = std::pin::pin!(answer);
        poll_fn(|cx| {
            self.drive(cx);
            answer.as_mut().poll(cx)
        })
        .await
    }
}

/// Returns whether hyper has no predicate for this error: it is neither an I/O error nor a premature close.
fn is_stray(error: &hyper::Error) -> bool {
    error.source().is_none() && !(error.is_incomplete_message() || error.is_canceled() || error.is_closed())
}
