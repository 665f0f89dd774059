//! Servers of raw bytes, for engines and collectors that behave unlike any HTTP library.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc::UnboundedSender;
use tokio_rustls::TlsAcceptor;

use crate::mock::Listening;

/// One raw request.
#[derive(Clone, Debug)]
pub struct RawRequest {
    /// Its index among the server's requests.
    pub number: usize,
    /// The request line and the headers in lower case.
    pub head: String,
    pub body: Vec<u8>,
}

impl RawRequest {
    /// The next request of a connection; `None` at its end. `read` keeps surplus bytes.
    async fn next(stream: &mut (impl AsyncRead + Unpin), read: &mut Vec<u8>, numbers: &AtomicUsize) -> Option<Self> {
        let head = loop {
            if let Some(at) = read.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            if stream.read_buf(read).await.ok()? == 0 {
                return None;
            }
        };
        let text = String::from_utf8(read[..head].to_vec()).unwrap().to_ascii_lowercase();
        let length = text.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
        let end = head + length.unwrap_or(0usize);
        while read.len() < end {
            if stream.read_buf(read).await.ok()? == 0 {
                return None;
            }
        }
        let rest = read.split_off(end);
        let body = std::mem::replace(read, rest).split_off(head);
        Some(Self { number: numbers.fetch_add(1, Ordering::SeqCst), head: text, body })
    }

    pub fn path(&self) -> &str {
        self.head.split(' ').nth(1).unwrap()
    }

    pub fn is_get(&self) -> bool {
        self.head.starts_with("get ")
    }

    /// Null if the body is not JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

/// A step of an answer. After the last one the next request is read.
#[derive(Clone, Debug)]
pub enum Step {
    Send(Vec<u8>),
    Wait(Duration),
    /// Signals that all previous bytes were sent.
    Signal(UnboundedSender<()>),
    /// Closes the connection.
    Close,
    /// Resets the connection. Bytes sent before still arrive.
    Reset,
    /// Sends nothing more, and keeps the connection open.
    Hang,
}

pub type Reply = Vec<Step>;

/// Sends these bytes, then reads the next request.
pub fn send(bytes: impl Into<Vec<u8>>) -> Reply {
    vec![Step::Send(bytes.into())]
}

/// Sends these bytes, then closes the connection.
pub fn close(bytes: impl Into<Vec<u8>>) -> Reply {
    vec![Step::Send(bytes.into()), Step::Close]
}

/// A complete answer with `Content-Length`; `headers` holds further header lines.
pub fn document(headers: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{headers}content-length: {length}\r\n\r\n{body}")
        .into_bytes()
}

/// A piece of a body in chunked coding.
pub fn chunk(text: &str) -> String {
    format!("{:x}\r\n{text}\r\n", text.len())
}

type Answer = dyn Fn(RawRequest) -> Pin<Box<dyn Future<Output = Reply> + Send>> + Send + Sync;

/// A server on loopback that answers with bytes chosen by the test.
#[derive(Debug)]
pub struct Wire {
    pub address: SocketAddr,
    /// Connections accepted.
    pub connections: Arc<AtomicUsize>,
    pub requests: Arc<AtomicUsize>,
    _listening: Listening,
}

impl Wire {
    /// Answers each request with the steps that `answer` returns.
    pub fn start<F>(answer: impl Fn(RawRequest) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Reply> + Send + 'static,
    {
        Self::start_at(([127, 0, 0, 1], 0).into(), None, answer)
    }

    /// Starts at `address`, optionally over TLS.
    pub fn start_at<F>(
        address: SocketAddr,
        tls: Option<TlsAcceptor>,
        answer: impl Fn(RawRequest) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Reply> + Send + 'static,
    {
        let answer: Arc<Answer> = Arc::new(move |request| Box::pin(answer(request)));
        let (connections, requests) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (opened, asked) = (Arc::clone(&connections), Arc::clone(&requests));
        let listening = Listening::start(address, async move |listener| {
            while let Ok((socket, _)) = listener.accept().await {
                opened.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(connection(socket, tls.clone(), Arc::clone(&answer), Arc::clone(&asked)));
            }
        });
        Self { address: listening.address, connections, requests, _listening: listening }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

async fn connection(
    mut socket: TcpStream,
    tls: Option<TlsAcceptor>,
    answer: Arc<Answer>,
    requests: Arc<AtomicUsize>,
) -> Option<()> {
    // Disables Nagle's algorithm: bytes are sent when written.
    socket.set_nodelay(true).ok()?;
    let last = match tls {
        None => talk(&mut socket, &*answer, &requests).await?,
        Some(tls) => talk(&mut tls.accept(&mut socket).await.ok()?, &*answer, &requests).await?,
    };
    if matches!(last, Step::Reset) {
        tokio::time::sleep(Duration::from_millis(5)).await;
        socket.set_zero_linger().ok()?;
    }
    Some(())
}

/// Serves until a step ends the connection; `None` if the client has.
async fn talk(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    answer: &Answer,
    requests: &AtomicUsize,
) -> Option<Step> {
    let mut read = Vec::new();
    loop {
        let request = RawRequest::next(stream, &mut read, requests).await?;
        for step in answer(request).await {
            match step {
                Step::Send(bytes) => stream.write_all(&bytes).await.ok()?,
                Step::Wait(time) => tokio::time::sleep(time).await,
                Step::Signal(to) => drop(to.send(())),
                Step::Close => {
                    stream.shutdown().await.ok()?;
                    return Some(step);
                }
                Step::Reset => return Some(step),
                Step::Hang => std::future::pending().await,
            }
        }
    }
}
