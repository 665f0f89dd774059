//! Running engines.

use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use semmoe_tables::ModelInfo;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::about;
use crate::dialect::{Dialect, SGLANG_0_5_23};
use crate::engine::{Engine, Seen, Settings, Texts};
use crate::serve::router;

/// A timeout far above any duration here; reaching it fails the test.
const PATIENCE: Duration = Duration::from_secs(60);

/// A listener with its own runtime, so that dropping it closes every socket at once.
#[derive(Debug)]
pub(crate) struct Listening {
    pub(crate) address: SocketAddr,
    runtime: Option<Runtime>,
}

impl Listening {
    pub(crate) fn start<F>(address: SocketAddr, serve: impl FnOnce(TcpListener) -> F + Send + 'static) -> Self
    where
        F: Future + Send + 'static,
    {
        let listener = std::net::TcpListener::bind(address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.spawn(async move {
            serve(TcpListener::from_std(listener).unwrap()).await;
        });
        Self { address, runtime: Some(runtime) }
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        // A runtime cannot be dropped inside another one.
        let runtime = self.runtime.take();
        std::thread::spawn(move || drop(runtime)).join().unwrap();
    }
}

/// A server on loopback.
#[derive(Debug)]
pub struct Server {
    pub address: SocketAddr,
    router: Router,
    listening: Option<Listening>,
}

impl Server {
    pub fn start(router: Router) -> Self {
        Self::start_at(([127, 0, 0, 1], 0).into(), router)
    }

    pub fn start_at(address: SocketAddr, router: Router) -> Self {
        let mut server = Self { address, router, listening: None };
        server.listen();
        server
    }

    /// Listens at the previous address again.
    pub fn listen(&mut self) {
        let router = self.router.clone();
        let listening = Listening::start(self.address, async move |listener| axum::serve(listener, router).await);
        self.address = listening.address;
        self.listening = Some(listening);
    }

    /// Behaves like a killed process: when this returns, every socket is closed.
    pub fn kill(&mut self) {
        self.listening = None;
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

/// A running engine.
#[derive(Debug)]
pub struct Mock {
    pub address: SocketAddr,
    /// The requests received.
    pub seen: UnboundedReceiver<Seen>,
    /// Notified when a client disconnects in the middle of an answer.
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

    /// Listens at the previous address again.
    pub fn listen(&mut self) {
        self.server.listen();
    }

    /// Behaves like a killed process: when this returns, every socket is closed.
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

/// An SGLang with `ranks` ranks that ignores bodies and answers with the request's path.
pub fn canned(ranks: u16) -> Mock {
    let mock = canned_as(Value::Null);
    let mut settings = mock.settings();
    let all = about::info(
        &mock,
        &Settings { info: None, version: mock.dialect.version.to_owned(), ranks, ..settings.clone() },
    );
    let few = ["model_path", "version", "dp_size", "attn_dp_size"];
    settings.info = Some(few.map(|member| (member.to_owned(), all[member].clone())).into_iter().collect());
    drop(settings);
    mock
}

/// An SGLang that ignores bodies, answers with the request's path, and reports `info` as its server information.
pub fn canned_as(info: Value) -> Mock {
    let model = ModelInfo {
        model: "tiny".to_owned(),
        tokenizer_sha256: None,
        num_experts: 0,
        top_k: 0,
        vocab_size: 0,
        num_hidden_layers: 0,
        layer_ids: Vec::new(),
    };
    let dialect = Dialect { info: &["/server_info"], ..SGLANG_0_5_23 };
    Mock::start(Engine::new(dialect, model, Texts::Unread).with(|settings| {
        (settings.info, settings.version) = (Some(info), "0.32.0".to_owned());
        (settings.lists, settings.context) = (None, 0);
    }))
}
