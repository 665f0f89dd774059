//! Engines that answer exactly the bytes that a test chose.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use semmoe_mock_engine::RawRequest;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

/// An engine on loopback.
pub(crate) struct Engine {
    pub(crate) address: SocketAddr,
    seen: Arc<Mutex<Vec<RawRequest>>>,
}

impl Engine {
    /// Answers each POST with these bytes; probes with an empty object.
    pub(crate) fn start(answer: &[u8]) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let (seen, answer) = (Arc::<Mutex<Vec<RawRequest>>>::default(), Arc::<[u8]>::from(answer));
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
    pub(crate) fn seen(&self) -> Vec<RawRequest> {
        self.seen.lock().unwrap().clone()
    }
}

pub(crate) const OK: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";

async fn serve(mut socket: TcpStream, seen: &Mutex<Vec<RawRequest>>, answer: &[u8]) -> std::io::Result<()> {
    socket.set_nodelay(true)?;
    let mut read = Vec::new();
    while let Some(request) = RawRequest::next(&mut socket, &mut read).await {
        if ["/v1/models", "/health"].contains(&request.path()) {
            socket.write_all(OK.as_bytes()).await?;
            continue;
        }
        seen.lock().unwrap().push(request);
        socket.write_all(answer).await?;
    }
    Ok(())
}
