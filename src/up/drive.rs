//! Sends a set of prompts through the gateway, a fixed number at a time.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use semmoe_engines::http::{AnswerLimits, BaseUrl, HttpClient};
use semmoe_text::{LineForm, LinePrompt, PromptLineError, PromptLines};
use serde_json::{Value, json};

use crate::error::CliError;
use crate::progress::{Progress, Steps as _};

/// Limits on one response.
const ANSWER_LIMITS: AnswerLimits = AnswerLimits { timeout: Duration::from_secs(120), max_bytes: 1 << 20 };

/// A request's route and body.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    path: &'static str,
    body: Value,
}

/// Reads prompts (JSON Lines) into greedy OpenAI requests for `model`.
pub(crate) fn read_jobs(path: &Path, model: &str, max_tokens: u32) -> Result<Vec<Job>, CliError> {
    let job = |line: Result<(usize, LinePrompt), PromptLineError>| {
        let (_, prompt) = line.map_err(CliError::input)?;
        let (path, key, prompt) = match prompt {
            LinePrompt::Messages { messages, .. } => ("/v1/chat/completions", "messages", messages),
            LinePrompt::Text(text) => ("/v1/completions", "prompt", text.into()),
            LinePrompt::Ids(ids) => ("/v1/completions", "prompt", ids.into()),
        };
        let body = json!({"model": model, "temperature": 0, "max_tokens": max_tokens, (key): prompt});
        Ok(Job { path, body })
    };
    PromptLines::open(path, LineForm::Json).map_err(CliError::input)?.map(job).collect()
}

/// Options for sending jobs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sending {
    /// Requests in flight.
    pub(crate) concurrency: usize,
    /// Whether to stream responses.
    pub(crate) stream: bool,
    /// Title of the progress line.
    pub(crate) title: &'static str,
}

/// Sends every job once and returns the elapsed time; the first failure aborts the run.
pub(crate) async fn drive(
    client: &HttpClient,
    url: &BaseUrl,
    jobs: &[Job],
    sending: Sending,
) -> Result<Duration, CliError> {
    let progress = Arc::new(Progress::start(sending.title, jobs.len() as u64));
    let next = Arc::new(AtomicUsize::new(0));
    let streamed = |job: &Job| {
        let mut job = job.clone();
        job.body["stream"] = sending.stream.into();
        job
    };
    let jobs: Arc<[Job]> = jobs.iter().map(streamed).collect();
    let began = Instant::now();
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..sending.concurrency {
        let (client, url, jobs) = (client.clone(), url.clone(), Arc::clone(&jobs));
        let (next, progress) = (Arc::clone(&next), Arc::clone(&progress));
        clients.spawn(async move {
            while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                let (url, answer) =
                    client.post(&url, job.path, &job.body, &ANSWER_LIMITS).await.map_err(CliError::failed)?;
                if sending.stream && !answer.trim_ascii_end().ends_with(b"data: [DONE]") {
                    return Err(CliError::failed(format!("the stream of {url} ended without [DONE]")));
                }
                progress.advance(1);
            }
            Ok::<(), CliError>(())
        });
    }
    while let Some(ended) = clients.join_next().await {
        ended.map_err(|error| CliError::failed(format!("a client task failed: {error}")))??;
    }
    let took = began.elapsed();
    if let Some(progress) = Arc::into_inner(progress) {
        progress.finish(&format!("{} requests", jobs.len()));
    }
    Ok(took)
}
