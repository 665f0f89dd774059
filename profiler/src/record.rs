//! Recording: prompts in, trace out.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use semmoe_engines::Engine;
use semmoe_engines::http::{AnswerLimits, BaseUrl, HttpClient};
use semmoe_engines::probe::server_info;
use semmoe_engines::sglang::ServerInfo;
use semmoe_tables::{ModelInfo, Provenance, TraceBuilder};
use serde::Serialize;

use crate::drive::{Driven, drive};
use crate::prompts::{Encoder, Preparation, Prompt, read};
use crate::{ProfilerError, Progress};

/// What to record, from where, and how.
#[derive(Clone, Debug)]
pub struct RecordOptions {
    /// The engine's kind: semmoe's worker or SGLang.
    pub engine: Engine,
    /// Its address.
    pub url: BaseUrl,
    /// JSON Lines: objects with `messages`, `input_ids` or `prompt`; the first of these that is there counts.
    pub prompts: PathBuf,
    /// The trace to write.
    pub out: PathBuf,
    /// Directory with `tokenizer.json` and `tokenizer_config.json`, or a `tokenizer.json`. Prompts are then sent as ids, and
    /// messages can be rendered; without it `prompt` is sent as text.
    pub tokenizer: Option<PathBuf>,
    /// The model's shape, for engines that do not tell it (`num_hidden_layers` must be known). Without a name it has the engine's.
    pub model: Option<ModelInfo>,
    /// Tokens to generate per prompt, at least 1. With 1 the trace holds exactly the prompts' tokens.
    pub max_tokens: u32,
    /// 0 is greedy. Above it each prompt has its own fixed seed.
    pub temperature: f32,
    /// Longer prompts are cut to this many tokens; needs a tokenizer unless all prompts are ids.
    pub max_prompt_tokens: Option<usize>,
    /// Only the first so many prompts.
    pub max_prompts: Option<usize>,
    /// Requests in flight, at least 1.
    pub concurrency: usize,
    /// The longest wait for one answer.
    pub request_timeout: Duration,
    /// Wait before the first retry; twice as long before the second.
    pub retry_pause: Duration,
    /// The share of answers, 0..1, that may be missing or wrong and are left out; more is an error.
    pub max_bad: f64,
    /// Creation time, RFC 3339.
    pub created: String,
}

impl RecordOptions {
    /// Options with the usual values: one token, greedy, 16 in flight, 120 s per answer, 1 % bad answers.
    #[must_use]
    pub fn new(engine: Engine, url: BaseUrl, prompts: PathBuf, out: PathBuf, created: String) -> Self {
        RecordOptions {
            engine,
            url,
            prompts,
            out,
            tokenizer: None,
            model: None,
            max_tokens: 1,
            temperature: 0.0,
            max_prompt_tokens: None,
            max_prompts: None,
            concurrency: 16,
            request_timeout: Duration::from_secs(120),
            retry_pause: Duration::from_millis(200),
            max_bad: 0.01,
            created,
        }
    }

    fn validate(&self) -> Result<(), ProfilerError> {
        let bad = |option, found: String, expected| Err(ProfilerError::Option { option, found, expected });
        if !self.engine.speaks_sglang() {
            return Err(ProfilerError::Engine { engine: self.engine });
        }
        if self.max_tokens == 0 {
            return bad("max_tokens", "0".into(), "at least 1");
        }
        if self.concurrency == 0 {
            return bad("concurrency", "0".into(), "at least 1");
        }
        if self.max_prompt_tokens == Some(0) {
            return bad("max_prompt_tokens", "0".into(), "at least 1");
        }
        if !(0.0..=1.0).contains(&self.max_bad) {
            return bad("max_bad", self.max_bad.to_string(), "a share between 0 and 1");
        }
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return bad("temperature", self.temperature.to_string(), "a number, not below 0");
        }
        check_directory(&self.out)
    }
}

/// A record that was left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BadRecord {
    /// Its line in the prompts file, from 1.
    pub line: usize,
    /// Why.
    pub reason: String,
}

/// What was recorded.
#[derive(Clone, Debug, Serialize)]
pub struct RecordReport {
    /// The trace.
    pub out: PathBuf,
    /// Digest of the trace.
    pub digest: String,
    /// The model.
    pub model: ModelInfo,
    /// Requests in the trace.
    pub requests: usize,
    /// Tokens in the trace.
    pub tokens: u64,
    /// Of these, tokens of prompts.
    pub prompt_tokens: u64,
    /// Records that were left out.
    pub bad: Vec<BadRecord>,
    /// Attempts that had to be repeated.
    pub retries: u64,
    /// From the first request to the last answer.
    pub seconds: f64,
}

/// Sends every prompt to an engine and writes what it answers about its routing as a trace, in the order of the prompts file.
/// The token sampled last has no route and is left out. `cancel` ends the run when it completes: requests in flight are
/// dropped and nothing is written.
///
/// # Errors
/// Wrong options or prompts before the first request; an engine that cannot be reached or does not tell its model; more bad
/// answers than allowed; a trace that cannot be written. Nothing is written then.
pub async fn record(
    options: RecordOptions,
    progress: &dyn Progress,
    cancel: impl Future<Output = ()> + Send,
) -> Result<RecordReport, ProfilerError> {
    let began = Instant::now();
    let (driven, seconds) = tokio::select! {
        biased;
        () = pin!(cancel) => return Err(ProfilerError::Cancelled),
        driven = run(&options, progress) => (driven?, began.elapsed().as_secs_f64()),
    };
    let Driven { builder, bad, retries, prompt_tokens } = driven;
    let (model, requests, tokens) = (builder.model().clone(), builder.requests(), builder.tokens() as u64);
    let out = options.out.clone();
    let digest = blocking(move || Ok(builder.write(&out)?)).await?;
    Ok(RecordReport { out: options.out, digest, model, requests, tokens, prompt_tokens, bad, retries, seconds })
}

async fn run(options: &RecordOptions, progress: &dyn Progress) -> Result<Driven, ProfilerError> {
    options.validate()?;
    let client = HttpClient::for_url(&options.url)?;
    let server = server_info(&client, &options.url, &AnswerLimits::default()).await?;
    let (model, prompts) = prepare(options, server).await?;
    let source = format!("recorded from {} at {}", options.engine, options.url);
    let builder = TraceBuilder::new(model, Provenance { source, created: options.created.clone() })?;
    drive(&client, options, &prompts, builder, progress).await
}

/// The model as engine, caller and tokenizer know it together, and the prompts.
async fn prepare(options: &RecordOptions, server: ServerInfo) -> Result<(ModelInfo, Vec<Prompt>), ProfilerError> {
    if server.enable_return_routed_experts == Some(false) {
        return Err(ProfilerError::NoRoutedExperts);
    }
    let mut model = model_of(options, &server)?;
    let options = Arc::new(options.clone());
    blocking(move || {
        let encoder = options.tokenizer.as_deref().map(Encoder::open).transpose()?;
        if let (Some(encoder), Some(path)) = (&encoder, &options.tokenizer) {
            adopt_tokenizer(&mut model, encoder, path)?;
        }
        let how = Preparation {
            encoder: encoder.as_ref(),
            vocab_size: model.vocab_size,
            max_prompt_tokens: options.max_prompt_tokens,
            max_prompts: options.max_prompts,
        };
        let prompts = read(&options.prompts, how)?;
        Ok((model, prompts))
    })
    .await
}

/// The caller's word and the engine's, which must agree.
fn model_of(options: &RecordOptions, server: &ServerInfo) -> Result<ModelInfo, ProfilerError> {
    let told = server.model_info();
    let mut given = options.model.clone();
    if let Some(given) = given.as_mut().filter(|given| given.model.is_empty()) {
        // A checkpoint's configuration does not say what it is called.
        given.model = server.model_name().ok_or(ProfilerError::UnknownModel { field: "the model's name" })?.to_owned();
    }
    let model = match (&given, told) {
        (Some(given), Some(told)) => {
            let mut model = told;
            model.adopt(given)?;
            model
        }
        (Some(given), None) => given.clone(),
        (None, Some(told)) => told,
        (None, None) => return Err(ProfilerError::UnknownModel { field: missing_field(server) }),
    };
    model.validate()?;
    if model.num_hidden_layers == 0 {
        return Err(ProfilerError::UnknownModel { field: "num_hidden_layers" });
    }
    Ok(model)
}

fn missing_field(server: &ServerInfo) -> &'static str {
    let fields = [
        (server.model_name().is_some(), "the model's name"),
        (server.num_experts.is_some(), "num_experts"),
        (server.top_k.is_some(), "top_k"),
        (server.vocab_size.is_some(), "vocab_size"),
        (server.num_hidden_layers.is_some(), "num_hidden_layers"),
    ];
    fields.into_iter().find(|(told, _)| !told).map_or("layer_ids", |(_, field)| field)
}

/// The tokenizer must be the model's: of the hash that the engine tells, or at least no larger than its vocabulary.
fn adopt_tokenizer(model: &mut ModelInfo, encoder: &Encoder, path: &Path) -> Result<(), ProfilerError> {
    let (hash, size) = (encoder.tokenizer.sha256(), encoder.tokenizer.vocab_size());
    let other = |cause| Err(ProfilerError::OtherTokenizer { path: path.to_path_buf(), cause });
    if size > model.vocab_size {
        return other(format!(
            "it has ids up to {}, and the model's vocabulary size is {}",
            size - 1,
            model.vocab_size
        ));
    }
    match &model.tokenizer_sha256 {
        Some(engine) if engine != hash => other(format!("its hash is {hash}, and the engine's is {engine}")),
        Some(_) => Ok(()),
        None => {
            model.tokenizer_sha256 = Some(hash.to_owned());
            Ok(())
        }
    }
}

/// Whether the trace will have a place to go: asked before an hour of recording, not after.
fn check_directory(out: &Path) -> Result<(), ProfilerError> {
    let directory = match out.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let failed = |source| ProfilerError::Io { path: out.to_path_buf(), action: "write", source };
    match std::fs::metadata(directory) {
        Err(source) => Err(failed(source)),
        Ok(metadata) if !metadata.is_dir() => {
            Err(failed(std::io::Error::other(format!("{} is not a directory", directory.display()))))
        }
        Ok(_) => Ok(()),
    }
}

/// Runs work that reads, writes or computes for long away from the runtime's threads.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ProfilerError> + Send + 'static,
) -> Result<T, ProfilerError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        // Only a runtime that shuts down cancels such work.
        Err(_) => Err(ProfilerError::Cancelled),
    }
}
