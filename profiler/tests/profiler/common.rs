//! A mock engine, and a directory to record into.

use std::path::PathBuf;
use std::time::Duration;

use semmoe_engines::Engine as Kind;
use semmoe_engines::http::BaseUrl;
use semmoe_mock_engine::{Dialect, Engine, Fault, Mock, SEMMOE, Texts, experts, generated};
use semmoe_profiler::{NoProgress, ProfilerError, RecordOptions, RecordReport, record};
use semmoe_tables::{LayerIdx, ModelInfo, Trace, TraceRequest};

/// An engine that reports its model, like semmoe's worker. The first layer is dense.
pub(crate) fn semmoe() -> Bench {
    Bench::start(SEMMOE, model(8, 2, 20_000, &[1, 2]))
}

/// A model with experts in these layers; the last of them is its last layer.
pub(crate) fn model(num_experts: u16, top_k: u16, vocab_size: u32, layer_ids: &[u16]) -> ModelInfo {
    ModelInfo {
        model: "mock".into(),
        tokenizer_sha256: None,
        num_experts,
        top_k,
        vocab_size,
        num_hidden_layers: layer_ids.last().map_or(0, |last| last + 1),
        layer_ids: layer_ids.to_vec(),
    }
}

/// The running engine.
pub(crate) struct Bench {
    pub(crate) engine: Mock,
    pub(crate) url: BaseUrl,
    pub(crate) directory: tempfile::TempDir,
}

impl Bench {
    pub(crate) fn start(dialect: Dialect, model: ModelInfo) -> Self {
        Self::serve(Engine::new(dialect, model, Texts::Bytes))
    }

    pub(crate) fn serve(engine: Engine) -> Self {
        let engine = Mock::start(engine);
        Self { url: engine.address.into(), engine, directory: tempfile::tempdir().unwrap() }
    }

    /// Injects a fault for prompts that begin with this token.
    pub(crate) fn fault(&self, first: u32, fault: Fault) {
        self.engine.settings().faults.insert(first, fault);
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn out(&self) -> PathBuf {
        self.path("out.trace.safetensors")
    }

    pub(crate) fn partial(&self) -> PathBuf {
        self.path("out.trace.safetensors.partial")
    }

    pub(crate) fn trace(&self) -> Trace {
        Trace::open(&self.out()).unwrap()
    }

    /// Options for a file with this name and content. The model of an engine that reports none comes from elsewhere.
    pub(crate) fn options(&self, name: &str, prompts: &[u8]) -> RecordOptions {
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
    pub(crate) fn lines(&self, lines: &[String]) -> RecordOptions {
        self.options("prompts.jsonl", lines.join("\n").as_bytes())
    }

    pub(crate) async fn record(&self, options: RecordOptions) -> Result<RecordReport, ProfilerError> {
        record(options, &NoProgress, std::future::pending()).await
    }

    /// Checks that the trace has the engine's routing for this request.
    pub(crate) fn check(&self, request: TraceRequest<'_>, prompt: &[u32], max_tokens: u32) {
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

    /// Whether the directory contains only the prompts.
    pub(crate) fn left_nothing(&self) -> bool {
        let files = std::fs::read_dir(self.directory.path()).unwrap().map(|entry| entry.unwrap().file_name());
        files.collect::<Vec<_>>() == ["prompts.jsonl"]
    }
}

/// A line of a prompts file.
pub(crate) fn ids_line(ids: &[u32]) -> String {
    serde_json::json!({ "input_ids": ids }).to_string()
}
