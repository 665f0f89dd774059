//! A mock engine, and a folder to record it into.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "tests")]

use std::path::PathBuf;
use std::time::Duration;

use semmoe_engines::Engine as Kind;
use semmoe_engines::http::BaseUrl;
use semmoe_mock_engine::{Dialect, Engine, Fault, Mock, SEMMOE, Texts, experts, generated};
use semmoe_profiler::{NoProgress, ProfilerError, RecordOptions, RecordReport, record};
use semmoe_tables::{LayerIdx, ModelInfo, Trace, TraceRequest};

/// An engine that reports its model, as semmoe's worker does. The first layer is dense.
pub fn semmoe() -> Bench {
    let model = ModelInfo {
        model: "mock".into(),
        tokenizer_sha256: None,
        num_experts: 8,
        top_k: 2,
        vocab_size: 20_000,
        num_hidden_layers: 3,
        layer_ids: vec![1, 2],
    };
    Bench::start(SEMMOE, model)
}

/// The engine, running.
pub struct Bench {
    pub engine: Mock,
    pub url: BaseUrl,
    pub directory: tempfile::TempDir,
}

impl Bench {
    pub fn start(dialect: Dialect, model: ModelInfo) -> Self {
        Self::serve(Engine::new(dialect, model, Texts::Bytes))
    }

    pub fn serve(engine: Engine) -> Self {
        let engine = Mock::start(engine);
        Self { url: engine.address.into(), engine, directory: tempfile::tempdir().unwrap() }
    }

    /// Prompts that begin with this token have this fault.
    pub fn fault(&self, first: u32, fault: Fault) {
        self.engine.settings().faults.insert(first, fault);
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn out(&self) -> PathBuf {
        self.path("out.trace.safetensors")
    }

    pub fn partial(&self) -> PathBuf {
        self.path("out.trace.safetensors.partial")
    }

    pub fn trace(&self) -> Trace {
        Trace::open(&self.out()).unwrap()
    }

    /// Options for a file of this name and content. The model of an engine that reports none is known from elsewhere.
    pub fn options(&self, name: &str, prompts: &[u8]) -> RecordOptions {
        std::fs::write(self.path(name), prompts).unwrap();
        let (kind, created) = (self.engine.dialect.engine, "2026-01-02T03:04:05Z".to_owned());
        let model = (kind != Kind::Semmoe).then(|| ModelInfo { model: String::new(), ..self.engine.model.clone() });
        RecordOptions {
            model,
            retries: 2,
            retry_pause: Duration::ZERO,
            ..RecordOptions::new(kind, self.url.clone(), self.path(name), self.out(), created)
        }
    }

    /// Options for a prompts file of these lines.
    pub fn lines(&self, lines: &[String]) -> RecordOptions {
        self.options("prompts.jsonl", lines.join("\n").as_bytes())
    }

    pub async fn record(&self, options: RecordOptions) -> Result<RecordReport, ProfilerError> {
        record(options, &NoProgress, std::future::pending()).await
    }

    /// The trace says of this request what the engine's router does.
    pub fn check(&self, request: TraceRequest<'_>, prompt: &[u32], max_tokens: u32) {
        let model = &self.engine.model;
        let output = generated(prompt, max_tokens, model.vocab_size);
        let tokens = [prompt, &output[..output.len() - 1]].concat();
        assert_eq!((request.token_ids(), request.prompt_len()), (&tokens[..], prompt.len()));
        for (position, &token) in tokens.iter().enumerate() {
            for (index, &layer) in model.layer_ids.iter().enumerate() {
                let route = request.route(position, LayerIdx::new(index as u16)).unwrap();
                let found: Vec<u16> = route.experts().map(|expert| expert.get()).collect();
                assert_eq!(found, experts(token, layer, model));
            }
        }
    }

    /// Whether nothing but the prompts is in the directory.
    pub fn left_nothing(&self) -> bool {
        let files = std::fs::read_dir(self.directory.path()).unwrap().map(|entry| entry.unwrap().file_name());
        files.collect::<Vec<_>>() == ["prompts.jsonl"]
    }
}

/// A line of a prompts file.
pub fn ids_line(ids: &[u32]) -> String {
    serde_json::json!({ "input_ids": ids }).to_string()
}
