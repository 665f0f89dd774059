//! Drives an engine: bounded concurrency, retries, results in the order of the prompts.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use semmoe_engines::http::{AnswerLimits, HttpClient, HttpError};
use semmoe_engines::sglang::{GENERATE, GenerateRequest, GenerateResponse, SamplingParams};
use semmoe_tables::TraceBuilder;

use crate::answer::{Checker, Routed};
use crate::prompts::{Input, Prompt};
use crate::{BadRecord, ProfilerError, Progress, RecordOptions};

/// Routed experts take about 4 kB a token for the largest models: enough for 60,000 tokens.
const MAX_ANSWER_BYTES: usize = 256 << 20;
/// Further attempts after a connection that failed or an error of the server.
const RETRIES: u32 = 2;
/// The longest reason kept.
const MAX_REASON_CHARS: usize = 400;
/// Between two messages.
const MESSAGE_INTERVAL: Duration = Duration::from_millis(250);

/// What came of one prompt.
struct Outcome {
    index: usize,
    retries: u32,
    routed: Result<Routed, String>,
}

/// What came of all of them.
#[derive(Debug)]
pub(crate) struct Driven {
    pub(crate) builder: TraceBuilder,
    pub(crate) bad: Vec<BadRecord>,
    pub(crate) retries: u64,
    pub(crate) prompt_tokens: u64,
}

/// Sends every prompt and pushes the checked answers into `builder`, in the order of the prompts.
pub(crate) async fn drive(
    client: &HttpClient,
    options: &RecordOptions,
    prompts: &[Prompt],
    builder: TraceBuilder,
    progress: &dyn Progress,
) -> Result<Driven, ProfilerError> {
    let checker = Checker::new(builder.model())?;
    let asked = Asked { client, options, checker: &checker };
    let mut answers = futures_util::stream::iter(prompts.iter().enumerate())
        .map(|(index, prompt)| asked.ask(index, prompt))
        .buffer_unordered(options.concurrency);
    let allowed = allowed_bad(options.max_bad, prompts.len());
    let mut run = Run::new(Driven { builder, bad: Vec::new(), retries: 0, prompt_tokens: 0 }, prompts, progress);
    progress.set_total(prompts.len() as u64);
    while let Some(outcome) = answers.next().await {
        run.take(outcome)?;
        // At the first answer too many: an engine that is gone would fail all the others as well.
        if run.driven.bad.len() > allowed {
            return Err(run.too_many_bad(allowed));
        }
    }
    if run.driven.builder.requests() == 0 {
        return Err(run.too_many_bad(allowed));
    }
    let mut driven = run.driven;
    driven.bad.sort_by_key(|bad| bad.line);
    Ok(driven)
}

/// How many of `total` answers may be bad.
fn allowed_bad(share: f64, total: usize) -> usize {
    (share * total as f64).floor() as usize
}

/// What every request needs.
#[derive(Clone, Copy)]
struct Asked<'a> {
    client: &'a HttpClient,
    options: &'a RecordOptions,
    checker: &'a Checker,
}

impl Asked<'_> {
    async fn ask(self, index: usize, prompt: &Prompt) -> Outcome {
        let request = self.request(index, &prompt.input);
        let limits = AnswerLimits { timeout: self.options.request_timeout, max_bytes: MAX_ANSWER_BYTES };
        let mut retries = 0;
        let answer: Result<GenerateResponse, HttpError> = loop {
            let answer = self.client.post_json(&self.options.url, GENERATE, &request, &limits).await;
            match answer {
                Err(error) if retries < RETRIES && worth_retrying(&error) => {
                    retries += 1;
                    tokio::time::sleep(self.options.retry_pause * retries).await;
                }
                answer => break answer,
            }
        };
        let routed = match answer {
            Ok(answer) => self.checker.check(&prompt.input, answer),
            Err(error) => Err(error.to_string()),
        };
        Outcome { index, retries, routed }
    }

    fn request(self, index: usize, input: &Input) -> GenerateRequest {
        let (text, input_ids) = match input {
            Input::Text(text) => (Some(text.clone()), None),
            Input::Ids(ids) => (None, Some(ids.clone())),
        };
        let mut sampling_params = SamplingParams::greedy(self.options.max_tokens);
        sampling_params.temperature = self.options.temperature;
        // Each prompt its own stream of numbers, the same in every run.
        sampling_params.sampling_seed = (self.options.temperature > 0.0).then_some(index as u64);
        GenerateRequest {
            text,
            input_ids,
            sampling_params,
            return_routed_experts: true,
            return_prompt_token_ids: true,
            ..GenerateRequest::default()
        }
    }
}

/// Generating twice does no harm, so whatever may have been bad luck is tried again; a request that took too long is not.
fn worth_retrying(error: &HttpError) -> bool {
    match error {
        HttpError::Connect { .. } | HttpError::Exchange { .. } | HttpError::Body { .. } => true,
        HttpError::Status { status, .. } => *status >= 500,
        _ => false,
    }
}

/// Puts outcomes into order and keeps count.
struct Run<'a> {
    driven: Driven,
    prompts: &'a [Prompt],
    progress: &'a dyn Progress,
    /// Outcomes that came before their turn; `None` = bad.
    early: BTreeMap<usize, Option<Routed>>,
    next: usize,
    answered: usize,
    tokens: u64,
    began: Instant,
    spoke: Instant,
}

impl<'a> Run<'a> {
    fn new(driven: Driven, prompts: &'a [Prompt], progress: &'a dyn Progress) -> Self {
        let began = Instant::now();
        Run { driven, prompts, progress, early: BTreeMap::new(), next: 0, answered: 0, tokens: 0, began, spoke: began }
    }

    fn take(&mut self, outcome: Outcome) -> Result<(), ProfilerError> {
        self.answered += 1;
        self.driven.retries += u64::from(outcome.retries);
        let routed = match outcome.routed {
            Ok(routed) => {
                self.tokens += routed.token_ids.len() as u64;
                self.driven.prompt_tokens += u64::from(routed.prompt_len);
                Some(routed)
            }
            Err(reason) => {
                // Engines write into some reasons.
                let reason = reason.chars().take(MAX_REASON_CHARS).collect();
                self.driven.bad.push(BadRecord { line: self.prompts[outcome.index].line, reason });
                None
            }
        };
        self.early.insert(outcome.index, routed);
        while let Some(routed) = self.early.remove(&self.next) {
            self.next += 1;
            if let Some(routed) = routed {
                self.driven.builder.push(&routed.token_ids, routed.prompt_len, &routed.experts, None)?;
            }
        }
        self.report();
        Ok(())
    }

    fn report(&mut self) {
        self.progress.advance(1);
        let last = self.answered == self.prompts.len();
        if !last && self.spoke.elapsed() < MESSAGE_INTERVAL {
            return;
        }
        self.spoke = Instant::now();
        let seconds = self.began.elapsed().as_secs_f64().max(1e-3);
        let left = (self.prompts.len() - self.answered) as f64 * seconds / self.answered as f64;
        let speed = self.tokens as f64 / seconds;
        self.progress.message(&format!("{} tokens, {speed:.0} tokens/s, {left:.0} s left", self.tokens));
    }

    fn too_many_bad(&self, allowed: usize) -> ProfilerError {
        let first = self.driven.bad.iter().min_by_key(|bad| bad.line);
        let (line, reason) = first.map_or((0, String::new()), |bad| (bad.line, bad.reason.clone()));
        ProfilerError::TooManyBad { bad: self.driven.bad.len(), asked: self.answered, allowed, line, reason }
    }
}
