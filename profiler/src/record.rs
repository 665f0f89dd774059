//! Recording: prompts in, trace out.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::{Duration, Instant};

use semmoe_engines::http::{AnswerLimits, BaseUrl, EngineKey, HttpClient};
use semmoe_engines::sglang::ServerInfo;
use semmoe_engines::{Engine, Version, probe, vllm};
use semmoe_tables::{CheckpointConfig, ModelInfo, Provenance, TraceWriter, directory_of};
use serde::Serialize;

use crate::bad::{check, check_share};
use crate::dense::{Probed, probe as probe_alone};
use crate::drive::{self, Driven, drive};
use crate::journal::{Journal, Settings, partial_path};
use crate::prompts::{Encoder, Preparation, PromptFormat, Prompts, read};
use crate::self_check::SelfCheck;
use crate::{BadRecord, ProfilerError, Progress};

/// The first SGLang that reports experts where a placement runs.
const LOGICAL_IDS_SINCE: Version = Version::new(0, 5, 10);
/// SGLang's name for experts in their order.
const TRIVIAL_LOCATION: &str = "trivial";

/// Options of a recording.
#[derive(Clone, Debug)]
pub struct RecordOptions {
    /// The engine's kind: SGLang, vLLM or semmoe's worker.
    pub engine: Engine,
    /// Its address.
    pub url: BaseUrl,
    /// The file with the key that the engine asks for: one line, sent as `Authorization: Bearer` with every request.
    pub api_key_file: Option<PathBuf>,
    /// The prompts.
    pub prompts: PathBuf,
    /// Their encoding.
    pub format: PromptFormat,
    /// The trace to write.
    pub out: PathBuf,
    /// Directory with `tokenizer.json` and `tokenizer_config.json`, or a `tokenizer.json`. Prompts are then sent as
    /// ids, and messages are rendered; without it `prompt` is sent as text and messages to the chat route.
    pub tokenizer: Option<PathBuf>,
    /// The model's shape, for engines that do not report it (`num_hidden_layers` must be known). Without a name it has
    /// the engine's.
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
    /// Requests begun a second, at most.
    pub rate: Option<f64>,
    /// The OpenAI routes also where the engine has `/generate`.
    pub openai_routes: bool,
    /// Start over where there is a partial recording.
    pub fresh: bool,
    /// The longest wait for one answer.
    pub request_timeout: Duration,
    /// Further attempts after a connection that failed, or an error of the server or a 429.
    pub retries: u32,
    /// Wait before the first retry; twice as long before each after it, up to 15 s.
    pub retry_pause: Duration,
    /// The share of records, 0..1, that may be missing or wrong and are left out; more is an error. Prompts that the
    /// engine refuses are left out, too, however many; that all are is an error.
    pub max_bad: f64,
    /// Creation time, RFC 3339.
    pub created: String,
}

impl RecordOptions {
    /// Options with the usual values: one token, greedy, 16 in flight, 120 s per answer, 1 % bad answers.
    pub fn new(engine: Engine, url: BaseUrl, prompts: PathBuf, out: PathBuf, created: String) -> Self {
        RecordOptions {
            engine,
            url,
            api_key_file: None,
            prompts,
            format: PromptFormat::Auto,
            out,
            tokenizer: None,
            model: None,
            max_tokens: 1,
            temperature: 0.0,
            max_prompt_tokens: None,
            max_prompts: None,
            concurrency: 16,
            rate: None,
            openai_routes: false,
            fresh: false,
            request_timeout: Duration::from_secs(120),
            retries: 4,
            retry_pause: Duration::from_millis(250),
            max_bad: 0.01,
            created,
        }
    }

    fn validate(&self) -> Result<(), ProfilerError> {
        if self.engine == Engine::Openai {
            return Err(ProfilerError::Engine { engine: self.engine });
        }
        check(self.max_tokens > 0, "max_tokens", 0, "at least 1")?;
        check(self.concurrency > 0, "concurrency", 0, "at least 1")?;
        check(self.max_prompt_tokens != Some(0), "max_prompt_tokens", 0, "at least 1")?;
        if let Some(rate) = self.rate {
            check((1e-6..=1e6).contains(&rate), "rate", rate, "requests a second, above 0")?;
        }
        check_share("max_bad", self.max_bad)?;
        let usable = self.temperature.is_finite() && self.temperature >= 0.0;
        check(usable, "temperature", self.temperature, "a number, not below 0")?;
        check_directory(&self.out)
    }
}

/// The report of a recording.
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
    /// Answers of an earlier run that ended early.
    pub resumed: usize,
    /// Layers that the model's configuration takes for MoE layers and that the engine reports no routes of.
    pub dense_layers: Vec<u16>,
    /// One prompt asked alone and among others; `None` where no such prompt had two usable answers, and for semmoe's
    /// worker, whose results do not depend on the batch.
    pub self_check: Option<SelfCheck>,
    /// Records that were left out.
    pub bad: Vec<BadRecord>,
    /// Of these, prompts that the engine refused (400, 413, 422), such as one that is too long. They do not count
    /// towards [`RecordOptions::max_bad`].
    pub refused: usize,
    /// Attempts that had to be repeated.
    pub retries: u64,
    /// From the first request to the last answer, of this run.
    pub seconds: f64,
}

/// Sends every prompt to an engine and writes what it answers about its routing as a trace, in the order of the prompts
/// file. The token sampled last has no route and is left out.
///
/// Good answers go to a partial recording beside the trace (`OUT.partial`) as they come. A recording that ended early
/// is continued by the same call: prompts that were answered well are not sent again. `cancel` ends the run when it
/// completes: requests in flight are dropped.
///
/// # Errors
/// Wrong options before the first request; an engine that cannot be reached or does not report its model; more bad
/// records than allowed; a trace that cannot be written. There is no trace then, and the partial recording stays if it
/// holds an answer.
pub async fn record(
    options: RecordOptions,
    progress: &dyn Progress,
    cancel: impl Future<Output = ()> + Send,
) -> Result<RecordReport, ProfilerError> {
    let began = Instant::now();
    let run = tokio::select! {
        biased;
        () = pin!(cancel) => None,
        run = run(&options, progress) => Some(run?),
    };
    let Some(Run { model, prompts, mut journal, driven, dense_layers }) = run else {
        // The run is dropped by now, and with it a partial recording without an answer.
        let partial = partial_path(&options.out);
        let kept = match partial.exists() {
            true => format!("what was recorded is kept in {}: the same command goes on from there", partial.display()),
            false => "nothing was written".to_owned(),
        };
        return Err(ProfilerError::Cancelled { kept });
    };
    let seconds = began.elapsed().as_secs_f64();
    let source = format!("recorded from {} at {}", options.engine, options.url);
    let provenance = Provenance { source, created: options.created };
    let Driven { bad, refused, retries, resumed, self_check } = driven;
    let report = RecordReport {
        out: options.out,
        digest: String::new(),
        model,
        requests: 0,
        tokens: 0,
        prompt_tokens: 0,
        resumed,
        dense_layers,
        self_check,
        bad: bad.into_iter().map(|(_, bad)| bad).collect(),
        refused,
        retries,
        seconds,
    };
    blocking(move || {
        let report = write(report, provenance, &prompts, &mut journal)?;
        journal.remove();
        Ok(report)
    })
    .await
}

/// A run's output for the trace.
struct Run {
    model: ModelInfo,
    prompts: Prompts,
    journal: Journal,
    driven: Driven,
    dense_layers: Vec<u16>,
}

async fn run(options: &RecordOptions, progress: &dyn Progress) -> Result<Run, ProfilerError> {
    options.validate()?;
    let client = HttpClient::for_url(&options.url)?;
    authorize(&client, options, progress)?;
    let server = server(&client, options).await?;
    let reported = server.model_info().is_some();
    let (model, prompts) = prepare(options, server).await?;
    let mut probed = Probed { model, dense_layers: Vec::new(), alone: None };
    if !reported {
        let mut first: Vec<_> = prompts.good.iter().take(options.concurrency).collect();
        first.sort_by_key(|prompt| std::cmp::Reverse(prompt.length()));
        let engine = drive::Engine { client: &client, options, model: &probed.model };
        probed = probe_alone(&engine, &first).await;
    }
    let Probed { model, dense_layers, alone } = probed;
    let settings = Settings::new(model.clone(), options.engine.to_string(), options.max_tokens, options.temperature);
    let mut journal = Journal::open(&options.out, &settings, options.fresh)?;
    let engine = drive::Engine { client: &client, options, model: &model };
    let driven = drive(&engine, &prompts, alone, &mut journal, progress).await?;
    Ok(Run { model, prompts, journal, driven, dense_layers })
}

fn authorize(client: &HttpClient, options: &RecordOptions, progress: &dyn Progress) -> Result<(), ProfilerError> {
    let Some(path) = &options.api_key_file else { return Ok(()) };
    let key = EngineKey::read(path).map_err(|source| ProfilerError::KeyFile { path: path.clone(), source })?;
    if let Some(mode) = key.open_mode {
        let path = path.display();
        progress.message(&format!("others than its owner can read the engine's key in {path} ({mode:03o}): chmod 600"));
    }
    client.set_authorization(Some(key.authorization));
    Ok(())
}

/// The server's report about itself and its model.
async fn server(client: &HttpClient, options: &RecordOptions) -> Result<ServerInfo, ProfilerError> {
    let limits = AnswerLimits::default();
    if options.engine.speaks_sglang() {
        return Ok(probe::server_info(client, &options.url, &limits).await?);
    }
    let model = vllm::first_model(client, &options.url, &limits).await?;
    let (served_model_name, model_path) = model.map_or((None, None), |model| (Some(model.id), model.root));
    Ok(ServerInfo { served_model_name, model_path, ..ServerInfo::default() })
}

/// Writes the answers in the order of the prompts, and what the trace holds into the report.
fn write(
    mut report: RecordReport,
    provenance: Provenance,
    prompts: &Prompts,
    journal: &mut Journal,
) -> Result<RecordReport, ProfilerError> {
    let mut writer = TraceWriter::create(&report.out, report.model.clone(), provenance, false)?;
    for prompt in &prompts.good {
        if let Some(routed) = journal.read(prompt.key)? {
            writer.push(&routed.token_ids, routed.prompt_len, &routed.experts, None)?;
            report.requests += 1;
            report.tokens += routed.token_ids.len() as u64;
            report.prompt_tokens += u64::from(routed.prompt_len);
        }
    }
    report.digest = writer.finish()?;
    Ok(report)
}

/// The model, from what the engine, the caller and the tokenizer know, and the prompts.
async fn prepare(options: &RecordOptions, server: ServerInfo) -> Result<(ModelInfo, Prompts), ProfilerError> {
    if server.enable_return_routed_experts == Some(false) {
        return Err(ProfilerError::NoRoutedExperts);
    }
    refuse_physical_ids(options.engine, &server)?;
    let mut model = model_of(options, &server)?;
    let options = options.clone();
    blocking(move || {
        let encoder = options.tokenizer.as_deref().map(Encoder::open).transpose()?;
        if let (Some(encoder), Some(path)) = (&encoder, &options.tokenizer) {
            adopt_tokenizer(&mut model, encoder, path)?;
        }
        let vocab_size = model.vocab_size;
        let prompts = read(Preparation { encoder: encoder.as_ref(), vocab_size, options: &options })?;
        Ok((model, prompts))
    })
    .await
}

/// SGLang 0.5.8 and 0.5.9 record the slots of a placement as if they were experts.
fn refuse_physical_ids(engine: Engine, server: &ServerInfo) -> Result<(), ProfilerError> {
    let version = server.version.as_deref().and_then(Version::parse);
    let placed = server.init_expert_location.as_deref().filter(|location| *location != TRIVIAL_LOCATION);
    match (version, placed) {
        (Some(version), Some(location)) if engine == Engine::Sglang && version < LOGICAL_IDS_SINCE => {
            let location = location.chars().take(100).collect();
            Err(ProfilerError::PhysicalIds { version: version.to_string(), location })
        }
        _ => Ok(()),
    }
}

/// The model as the caller and the engine describe it, which must agree.
fn model_of(options: &RecordOptions, server: &ServerInfo) -> Result<ModelInfo, ProfilerError> {
    let reported = server.model_info();
    let mut given = match (&options.model, &reported) {
        // An engine on this machine names the folder of its checkpoint.
        (None, None) => local_config(server)?,
        (given, _) => given.clone(),
    };
    if let Some(given) = given.as_mut().filter(|given| given.model.is_empty()) {
        // A checkpoint's configuration does not say what it is called.
        given.model = server.model_name().ok_or(ProfilerError::UnknownModel { field: "the model's name" })?.to_owned();
    }
    let model = match (reported, given) {
        (Some(mut reported), Some(given)) => {
            reported.adopt(&given)?;
            reported
        }
        (reported, given) => {
            reported.or(given).ok_or_else(|| ProfilerError::UnknownModel { field: missing_field(server) })?
        }
    };
    model.validate()?;
    if model.num_hidden_layers == 0 {
        return Err(ProfilerError::UnknownModel { field: "num_hidden_layers" });
    }
    Ok(model)
}

/// The model's shape by `config.json`, or the one in a folder, for engines that do not report it. Its name is left
/// empty.
///
/// # Errors
/// Names the file and the field that is missing or of no use.
pub fn model_config(path: &Path) -> Result<ModelInfo, ProfilerError> {
    Ok(CheckpointConfig::open(path)?.model_info()?)
}

fn local_config(server: &ServerInfo) -> Result<Option<ModelInfo>, ProfilerError> {
    let config = server.model_path.as_deref().map(|path| Path::new(path).join("config.json"));
    config.filter(|config| config.is_file()).map(|config| model_config(&config)).transpose()
}

fn missing_field(server: &ServerInfo) -> &'static str {
    let fields = [
        (server.model_name().is_some(), "the model's name"),
        (server.num_experts.is_some(), "num_experts"),
        (server.top_k.is_some(), "top_k"),
        (server.vocab_size.is_some(), "vocab_size"),
        (server.num_hidden_layers.is_some(), "num_hidden_layers"),
    ];
    fields.into_iter().find(|(reported, _)| !reported).map_or("layer_ids", |(_, field)| field)
}

/// The tokenizer must be the model's: of the hash that the engine reports, or at least no larger than its vocabulary.
fn adopt_tokenizer(model: &mut ModelInfo, encoder: &Encoder, path: &Path) -> Result<(), ProfilerError> {
    let (hash, size) = (encoder.tokenizer.sha256(), encoder.tokenizer.vocab_size());
    let other = |cause| Err(ProfilerError::OtherTokenizer { path: path.to_path_buf(), cause });
    if size > model.vocab_size {
        let (last, expected) = (size - 1, model.vocab_size);
        return other(format!("it has ids up to {last}, and the model's vocabulary size is {expected}"));
    }
    let engine = model.tokenizer_sha256.get_or_insert_with(|| hash.to_owned());
    if engine == hash { Ok(()) } else { other(format!("its hash is {hash}, and the engine's is {engine}")) }
}

/// Checks the trace's directory before an hour of recording, not after.
fn check_directory(out: &Path) -> Result<(), ProfilerError> {
    let directory = directory_of(out);
    let failed = ProfilerError::io(out, "write");
    if !std::fs::metadata(directory).map_err(&failed)?.is_dir() {
        return Err(failed(std::io::Error::other(format!("{} is not a directory", directory.display()))));
    }
    Ok(())
}

/// Runs long reads, writes and computations off the runtime's threads.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ProfilerError> + Send + 'static,
) -> Result<T, ProfilerError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        // Only a runtime that shuts down cancels such work.
        Err(_) => Err(ProfilerError::Cancelled { kept: "nothing was written".into() }),
    }
}
