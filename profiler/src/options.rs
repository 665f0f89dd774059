//! Options of a recording.

use std::path::{Path, PathBuf};
use std::time::Duration;

use semmoe_engines::Engine;
use semmoe_engines::http::BaseUrl;
use semmoe_tables::{ModelInfo, directory_of};

use crate::ProfilerError;
use crate::error::{check, check_share};

/// Format of a prompts file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptFormat {
    /// Chosen by file extension: `.json` is ShareGPT, `.txt` plain text, anything else JSON Lines.
    #[default]
    Auto,
    /// One object per line, with `messages`, `input_ids` or `prompt`, in order of precedence.
    JsonLines,
    /// A list of objects with `conversations`; turns after the last human turn are dropped.
    ShareGpt,
    /// One prompt per line.
    Text,
}

impl PromptFormat {
    /// Resolves `Auto` to the format for a file's extension.
    pub(crate) fn of(self, path: &Path) -> Self {
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        match self {
            PromptFormat::Auto if extension.eq_ignore_ascii_case("json") => PromptFormat::ShareGpt,
            PromptFormat::Auto if extension.eq_ignore_ascii_case("txt") => PromptFormat::Text,
            PromptFormat::Auto => PromptFormat::JsonLines,
            given => given,
        }
    }
}

/// Options of a recording.
#[derive(Clone, Debug)]
pub struct RecordOptions {
    /// The kind of engine: SGLang, vLLM or semmoe's worker.
    pub engine: Engine,
    /// Address of the engine.
    pub url: BaseUrl,
    /// A file with the engine's API key: one line, sent as `Authorization: Bearer` with every request.
    pub api_key_file: Option<PathBuf>,
    /// The prompts file.
    pub prompts: PathBuf,
    /// Format of the prompts file.
    pub format: PromptFormat,
    /// The trace to write.
    pub out: PathBuf,
    /// Directory with `tokenizer.json` and `tokenizer_config.json`, or a `tokenizer.json`. If set, messages are
    /// rendered and prompts are sent as ids; otherwise `prompt` is sent as text, and messages are sent to the chat
    /// route.
    pub tokenizer: Option<PathBuf>,
    /// The model's shape, for engines that do not report it. `num_hidden_layers` is required. An empty name is replaced
    /// with the engine's name for the model.
    pub model: Option<ModelInfo>,
    /// Tokens to generate per prompt, at least 1. With 1 the trace contains exactly the prompts' tokens.
    pub max_tokens: u32,
    /// Sampling temperature. 0 is greedy; otherwise each prompt has its own fixed seed.
    pub temperature: f32,
    /// Truncate longer prompts to this many tokens; requires a tokenizer unless all prompts are ids.
    pub max_prompt_tokens: Option<usize>,
    /// Use only this many prompts.
    pub max_prompts: Option<usize>,
    /// Maximum number of requests in flight, at least 1.
    pub concurrency: usize,
    /// Maximum number of requests started per second.
    pub rate: Option<f64>,
    /// Use the OpenAI routes even if the engine has `/generate`.
    pub openai_routes: bool,
    /// Discard an existing partial recording.
    pub fresh: bool,
    /// Timeout per request.
    pub request_timeout: Duration,
    /// Number of retries after a failed connection, a server error or a 429.
    pub retries: u32,
    /// Pause before the first retry; doubles with each further retry, up to 15 s.
    pub retry_pause: Duration,
    /// Tolerated fraction of missing or invalid records, 0..1. They are skipped; a higher fraction is an error. Any
    /// number of prompts that the engine rejects is skipped, but it is an error if it rejects all.
    pub max_bad: f64,
    /// Creation time, RFC 3339.
    pub created: String,
}

impl RecordOptions {
    /// Default options: one token, greedy, 16 in flight, 120 s per request, at most 1% bad records.
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

    pub(crate) fn validate(&self) -> Result<(), ProfilerError> {
        if self.engine == Engine::Openai {
            return Err(ProfilerError::Engine(self.engine));
        }
        check(self.max_tokens > 0, "max_tokens", 0, "at least 1")?;
        check(self.concurrency > 0, "concurrency", 0, "at least 1")?;
        check(self.max_prompt_tokens != Some(0), "max_prompt_tokens", 0, "at least 1")?;
        if let Some(rate) = self.rate {
            check((1e-6..=1e6).contains(&rate), "rate", rate, "requests per second, above 0")?;
        }
        check_share("max_bad", self.max_bad)?;
        let usable = self.temperature.is_finite() && self.temperature >= 0.0;
        check(usable, "temperature", self.temperature, "a non-negative number")?;
        check_directory(&self.out)
    }
}

/// Checks the trace's directory before a long recording rather than after it.
fn check_directory(out: &Path) -> Result<(), ProfilerError> {
    let directory = directory_of(out);
    let failed = ProfilerError::io(out, "write");
    if !std::fs::metadata(directory).map_err(&failed)?.is_dir() {
        return Err(failed(std::io::Error::other(format!("{} is not a directory", directory.display()))));
    }
    Ok(())
}
