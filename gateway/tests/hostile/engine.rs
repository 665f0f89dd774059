//! Engines that answer exactly the bytes that a test chose.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// One request as it arrived.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    /// The first line and the headers, in lower case.
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

/// An engine on loopback.
pub(crate) struct Engine {
    pub(crate) address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Engine {
    /// Answers each POST with these bytes; probes with an empty object.
    pub(crate) fn start(answer: &[u8]) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let (seen, answer) = (Arc::<Mutex<Vec<Seen>>>::default(), Arc::<[u8]>::from(answer));
        let to = Arc::clone(&seen);
        // A test may block while it waits for a gateway that asks this engine.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).unwrap();
                while let Ok((socket, _)) = listener.accept().await {
                    let (seen, answer) = (Arc::clone(&to), Arc::clone(&answer));
                    tokio::spawn(async move { serve(socket, &seen, &answer).await });
                }
            });
        });
        Self { address, seen }
    }

    /// Answers `{}`.
    pub(crate) fn honest() -> Self {
        Self::start(OK.as_bytes())
    }

    /// The requests so far that were no probes.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }
}

pub(crate) const OK: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";

async fn serve(socket: TcpStream, seen: &Mutex<Vec<Seen>>, answer: &[u8]) -> std::io::Result<()> {
    socket.set_nodelay(true)?;
    let mut socket = BufReader::new(socket);
    loop {
        let (mut head, mut length) = (String::new(), 0);
        loop {
            let mut line = String::new();
            if socket.read_line(&mut line).await? == 0 {
                return Ok(());
            }
            let line = line.to_ascii_lowercase();
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
            if line == "\r\n" {
                break;
            }
            head.push_str(&line);
        }
        let mut body = vec![0; length];
        socket.read_exact(&mut body).await?;
        if head.starts_with("get /v1/models ") || head.starts_with("get /health ") {
            socket.write_all(OK.as_bytes()).await?;
            continue;
        }
        seen.lock().unwrap().push(Seen { head, body });
        socket.write_all(answer).await?;
    }
}
