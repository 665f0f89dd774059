//! Engines that run.

use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::engine::{Engine, Seen, router};

/// Longer than anything here takes; a test that waits for it fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// A server on loopback. It has its own runtime, so that killing it closes every socket at once.
#[derive(Debug)]
pub struct Server {
    pub address: SocketAddr,
    router: Router,
    runtime: Option<Runtime>,
}

impl Server {
    pub fn start(router: Router) -> Self {
        Self::start_at(([127, 0, 0, 1], 0).into(), router)
    }

    pub fn start_at(address: SocketAddr, router: Router) -> Self {
        let mut server = Self { address, router, runtime: None };
        server.listen();
        server
    }

    /// Binds the address that it had before.
    pub fn listen(&mut self) {
        let listener = std::net::TcpListener::bind(self.address).unwrap();
        listener.set_nonblocking(true).unwrap();
        self.address = listener.local_addr().unwrap();
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let router = self.router.clone();
        runtime.spawn(async move { axum::serve(TcpListener::from_std(listener).unwrap(), router).await });
        self.runtime = Some(runtime);
    }

    /// As if its process was killed: when this returns, every socket is closed.
    pub fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // A runtime cannot be dropped inside another one.
            std::thread::spawn(move || drop(runtime)).join().unwrap();
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// An engine that runs.
#[derive(Debug)]
pub struct Mock {
    pub address: SocketAddr,
    /// The requests that came.
    pub seen: UnboundedReceiver<Seen>,
    /// A client went away in the middle of an answer.
    pub gone: UnboundedReceiver<()>,
    engine: Arc<Engine>,
    server: Server,
}

impl Deref for Mock {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.engine
    }
}

impl Mock {
    pub fn start(engine: Engine) -> Self {
        Self::start_at(([127, 0, 0, 1], 0).into(), engine)
    }

    pub fn start_at(address: SocketAddr, engine: Engine) -> Self {
        let (seen, gone) = engine.listeners.lock().unwrap().take().unwrap();
        let engine = Arc::new(engine);
        let server = Server::start_at(address, router(Arc::clone(&engine)));
        Self { address: server.address, seen, gone, engine, server }
    }

    /// Binds the address that it had before.
    pub fn listen(&mut self) {
        self.server.listen();
    }

    /// As if its process was killed: when this returns, every socket is closed.
    pub fn kill(&mut self) {
        self.server.kill();
    }

    pub fn url(&self) -> String {
        self.server.url()
    }

    pub async fn next(&mut self) -> Seen {
        tokio::time::timeout(PATIENCE, self.seen.recv()).await.expect("a request in time").unwrap()
    }

    pub async fn next_gone(&mut self) {
        tokio::time::timeout(PATIENCE, self.gone.recv()).await.expect("a disconnect in time").unwrap();
    }
}
