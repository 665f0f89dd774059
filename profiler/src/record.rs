//! Records a trace by sending prompts to an engine.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Instant;

use semmoe_engines::http::{AnswerLimits, EngineKey, HttpClient};
use semmoe_engines::sglang::ServerInfo;
use semmoe_engines::{Engine, Version, probe, vllm};
use semmoe_tables::{CheckpointConfig, ModelInfo, Provenance, TraceWriter};
use serde::Serialize;

use crate::dense::{Probed, probe as probe_alone};
use crate::drive::{self, Driven, drive};
use crate::journal::{Journal, Settings, partial_path};
use crate::options::RecordOptions;
use crate::prompts::{Encoder, Preparation, Prompts, read};
use crate::self_check::SelfCheck;
use crate::{BadRecord, ProfilerError, Progress};

/// The first SGLang version that reports logical experts under a placement.
const LOGICAL_IDS_SINCE: Version = Version::new(0, 5, 10);
/// SGLang's name for the default placement, with experts in order.
const TRIVIAL_LOCATION: &str = "trivial";

/// The report of a recording.
#[derive(Clone, Debug, Serialize)]
pub struct RecordReport {
    /// The trace file.
    pub out: PathBuf,
    /// Digest of the trace.
    pub digest: String,
    /// The model.
    pub model: ModelInfo,
    /// Number of requests in the trace.
    pub requests: usize,
    /// Number of tokens in the trace.
    pub tokens: u64,
    /// Number of prompt tokens in the trace.
    pub prompt_tokens: u64,
    /// Number of responses reused from an interrupted run.
    pub resumed: usize,
    /// Layers that the model's configuration declares as MoE layers, but for which the engine reports no routes.
    pub dense_layers: Vec<u16>,
    /// Comparison of one prompt sent alone and with others. `None` if it did not get two usable responses, and for
    /// semmoe's worker, whose results do not depend on the batch.
    pub self_check: Option<SelfCheck>,
    /// Records that were skipped.
    pub bad: Vec<BadRecord>,
    /// Number of prompts that the engine rejected (400, 413, 422), for example because they are too long. They do not
    /// count towards [`RecordOptions::max_bad`].
    pub refused: usize,
    /// Number of retries.
    pub retries: u64,
    /// Time from the first request to the last response in this run.
    pub seconds: f64,
}

/// Sends every prompt to an engine and writes the reported routing to a trace, in the order of the prompts file. The
/// last sampled token has no route and is omitted.
///
/// Good responses are appended to a partial recording next to the trace (`OUT.partial`) as they arrive. Calling this
/// again resumes an interrupted recording: prompts with good responses are not sent again. When `cancel` completes, the
/// run ends and drops requests in flight.
///
/// # Errors
/// If options are invalid (checked before the first request), the engine cannot be reached or does not report its
/// model, too many records are bad, or the trace cannot be written. No trace is written in these cases; the partial
/// recording is kept if it contains a response.
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
        // The run was dropped, which deleted the partial recording if it was empty.
        let partial = partial_path(&options.out);
        let kept = match partial.exists() {
            true => format!("the partial recording is kept in {}: run the same command to resume", partial.display()),
            false => "nothing was written".to_owned(),
        };
        return Err(ProfilerError::Cancelled(kept));
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

/// A run's output, from which the trace is written.
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
        progress.message(&format!("other users can read the engine's key in {path} ({mode:03o}): chmod 600"));
    }
    client.set_authorization(Some(key.authorization));
    Ok(())
}

/// Queries the server for information about itself and its model.
async fn server(client: &HttpClient, options: &RecordOptions) -> Result<ServerInfo, ProfilerError> {
    let limits = AnswerLimits::default();
    if options.engine.speaks_sglang() {
        return Ok(probe::server_info(client, &options.url, &limits).await?);
    }
    let model = vllm::first_model(client, &options.url, &limits).await?;
    let (served_model_name, model_path) = model.map_or((None, None), |model| (Some(model.id), model.root));
    Ok(ServerInfo { served_model_name, model_path, ..ServerInfo::default() })
}

/// Writes the responses to the trace in prompt order, and fills in the report.
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

/// Determines the model from the engine, the caller and the tokenizer, and reads the prompts.
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

/// SGLang 0.5.8 and 0.5.9 record physical slots as if they were experts.
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

/// Combines the model descriptions of the caller and the engine, which must agree.
fn model_of(options: &RecordOptions, server: &ServerInfo) -> Result<ModelInfo, ProfilerError> {
    let reported = server.model_info();
    let mut given = match (&options.model, &reported) {
        // An engine on the same machine reports its checkpoint directory.
        (None, None) => local_config(server)?,
        (given, _) => given.clone(),
    };
    if let Some(given) = given.as_mut().filter(|given| given.model.is_empty()) {
        // A checkpoint's configuration does not contain the model's name.
        given.model = server.model_name().ok_or(ProfilerError::UnknownModel("the model's name"))?.to_owned();
    }
    let model = match (reported, given) {
        (Some(mut reported), Some(given)) => {
            reported.adopt(&given)?;
            reported
        }
        (reported, given) => reported.or(given).ok_or_else(|| ProfilerError::UnknownModel(missing_field(server)))?,
    };
    model.validate()?;
    if model.num_hidden_layers == 0 {
        return Err(ProfilerError::UnknownModel("num_hidden_layers"));
    }
    Ok(model)
}

/// Reads the model's shape from a `config.json` or its directory, for engines that do not report it. The name is left
/// empty.
///
/// # Errors
/// If the file cannot be read, or a field is missing or unusable.
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

/// Checks that the tokenizer matches the model, by the hash if the engine reports one, otherwise by the vocabulary size
/// only.
fn adopt_tokenizer(model: &mut ModelInfo, encoder: &Encoder, path: &Path) -> Result<(), ProfilerError> {
    let (hash, size) = (encoder.tokenizer.sha256(), encoder.tokenizer.vocab_size());
    let other = |found, expected| Err(ProfilerError::OtherTokenizer { path: path.to_path_buf(), found, expected });
    if size > model.vocab_size {
        let expected = format!("the model's vocabulary size is {}", model.vocab_size);
        return other(format!("it has ids up to {}", size - 1), expected);
    }
    let engine = model.tokenizer_sha256.get_or_insert_with(|| hash.to_owned());
    if engine == hash { Ok(()) } else { other(format!("its hash is {hash}"), format!("the engine's is {engine}")) }
}

/// Runs long I/O and computations off the async runtime's threads.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ProfilerError> + Send + 'static,
) -> Result<T, ProfilerError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        // Blocking work is only cancelled when the runtime shuts down.
        Err(_) => Err(ProfilerError::Cancelled("nothing was written".into())),
    }
}
