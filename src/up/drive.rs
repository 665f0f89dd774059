//! Sends a set of prompts through the gateway, a fixed number at a time.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use semmoe_engines::http::{AnswerLimits, BaseUrl, HttpClient};
use serde_json::{Value, json};

use crate::error::CliError;
use crate::progress::Progress;

/// Longest wait for one answer.
const ANSWER_LIMITS: AnswerLimits = AnswerLimits { timeout: Duration::from_secs(120), max_bytes: 1 << 20 };

/// One request: its route and body.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    path: &'static str,
    body: Value,
}

/// Reads prompts (JSON Lines with `messages` or `prompt`) as greedy OpenAI requests for `model`.
pub(crate) fn read_jobs(path: &Path, model: &str, max_tokens: u32) -> Result<Vec<Job>, CliError> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| CliError::input(format!("the prompts {} cannot be read: {error}", path.display())))?;
    text.lines()
        .enumerate()
        .map(|(index, line)| {
            let bad = |cause: &str| CliError::input(format!("{} line {}: {cause}", path.display(), index + 1));
            let record: Value = serde_json::from_str(line).map_err(|error| bad(&error.to_string()))?;
            let mut body = json!({"model": model, "temperature": 0, "max_tokens": max_tokens});
            if record["messages"].is_array() {
                body["messages"] = record["messages"].clone();
                Ok(Job { path: "/v1/chat/completions", body })
            } else if record["prompt"].is_string() {
                body["prompt"] = record["prompt"].clone();
                Ok(Job { path: "/v1/completions", body })
            } else {
                Err(bad("neither \"messages\" nor \"prompt\""))
            }
        })
        .collect()
}

/// Sends every job once, `concurrency` at a time; the first failure ends the run. Returns the time it took.
pub(crate) async fn drive(
    client: &HttpClient,
    url: &BaseUrl,
    jobs: &Arc<Vec<Job>>,
    concurrency: usize,
    title: &'static str,
) -> Result<Duration, CliError> {
    let progress = Arc::new(Progress::start(title, jobs.len() as u64));
    let next = Arc::new(AtomicUsize::new(0));
    let began = Instant::now();
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..concurrency {
        let (client, url, jobs) = (client.clone(), url.clone(), Arc::clone(jobs));
        let (next, progress) = (Arc::clone(&next), Arc::clone(&progress));
        clients.spawn(async move {
            while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                client
                    .post_json::<_, Value>(&url, job.path, &job.body, &ANSWER_LIMITS)
                    .await
                    .map_err(CliError::failed)?;
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
