//! An engine that is started as the document says, and started anew in its place.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use semmoe_tables::ModelInfo;
use semmoe_text::{ChatTemplate, Tokenizer};
use tokio::runtime::Runtime;

use crate::mock::{Dialect, Engine, Ranks, Texts, router};

/// A mock engine behind one address.
pub(crate) struct Fleet {
    dialect: Dialect,
    pub(crate) address: SocketAddr,
    running: Option<(Runtime, Arc<Engine>)>,
    /// As told when it was started first.
    ranks: u16,
}

impl Fleet {
    pub(crate) fn new(dialect: Dialect) -> Self {
        // The address is kept while no engine is there.
        let address = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
        Self { dialect, address, running: None, ranks: 1 }
    }

    /// Ends what runs and starts an engine with these arguments of its command. `model` is the folder of its checkpoint.
    pub(crate) fn start(&mut self, arguments: &[String], model: &Path) {
        let after = |name: &str| arguments.iter().position(|word| word == name).and_then(|at| arguments.get(at + 1));
        let ranks = ["--attn-dp-size", "--dp-size", "--data-parallel-size"].into_iter().find_map(after);
        let ranks = ranks.map(|count| count.parse().expect("a number"));
        self.ranks = ranks.unwrap_or(self.ranks);
        let shape = semmoe_profiler::model_config(model).expect("a checkpoint's config.json");
        let named = after("--served-model-name").map_or("Qwen/Qwen3-30B-A3B", String::as_str);
        let tokenizer = Tokenizer::from_file(&model.join("tokenizer.json")).expect("a tokenizer");
        let template = ChatTemplate::from_config_file(&model.join("tokenizer_config.json")).expect("a template");
        let texts = Texts::Model(Box::new(tokenizer), Some(Box::new(template)));
        let mut engine = Engine::new(self.dialect, ModelInfo { model: named.to_owned(), ..shape }, texts);
        engine.ranks = Ranks::new(self.ranks);
        engine.gives_routes = arguments.iter().any(|word| word == "--enable-return-routed-experts");
        if let Some(location) = after("--init-expert-location") {
            location.clone_into(&mut engine.init_expert_location);
        }
        // The old process is gone before the new one listens.
        drop(self.running.take());
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
        let (engine, address) = (Arc::new(engine), self.address);
        let routes = router(Arc::clone(&engine));
        let listener = runtime.block_on(tokio::net::TcpListener::bind(address)).expect("its address");
        runtime.spawn(async move { axum::serve(listener, routes).await });
        self.running = Some((runtime, engine));
    }

    /// Whether requests last until the loads were asked for.
    pub(crate) fn linger(&self, linger: bool) {
        let (_, engine) = self.running.as_ref().expect("an engine runs");
        engine.ranks.linger.store(linger, Ordering::SeqCst);
    }
}
