//! Drives an engine with bounded concurrency and rate, and with retries; appends good responses to the partial
//! recording.

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use semmoe_engines::http::{AnswerLimits, HttpClient};
use semmoe_engines::recording::{Question, ReportedAnswer, Sampling, ask, read, uncached};
use semmoe_tables::{ModelInfo, TraceBuilder};

use crate::answer::{Alike, AnswerError, Routed, check, rules};
use crate::bad::allowed_bad;
use crate::journal::Journal;
use crate::prompts::{Prompt, PromptKey, Prompts};
use crate::self_check::SelfCheck;
use crate::{BadRecord, ProfilerError, Progress, RecordOptions};

/// Maximum response size. Routed experts take about 4 kB per token for the largest models, so this is enough for 60,000
/// tokens.
const MAX_ANSWER_BYTES: usize = 256 << 20;
/// Maximum wait before a retry.
const MAX_PAUSE: Duration = Duration::from_secs(15);
/// Maximum length of a stored reason.
const MAX_REASON_CHARS: usize = 400;
/// Number of prompts that an engine may reject before its first good response.
const REFUSED_AT_FIRST: usize = 100;
/// Interval between progress messages.
const MESSAGE_INTERVAL: Duration = Duration::from_millis(250);

/// The outcome of one prompt.
struct Outcome {
    index: usize,
    retries: u32,
    routed: Result<Routed, AnswerError>,
    /// Whether the engine rejected this prompt.
    refused: bool,
}

/// The outcome of all prompts.
#[derive(Debug)]
pub(crate) struct Driven {
    /// Bad records in file order.
    pub(crate) bad: Vec<(usize, BadRecord)>,
    /// Number of bad records that the engine rejected.
    pub(crate) refused: usize,
    pub(crate) retries: u64,
    /// Responses reused from an earlier run.
    pub(crate) resumed: usize,
    pub(crate) self_check: Option<SelfCheck>,
}

/// Sends every prompt that has no good response yet, and appends validated responses to the journal. Compares routes as
/// soon as the engine responds again to the prompt that was sent alone.
pub(crate) async fn drive(
    asked: &Engine<'_>,
    prompts: &Prompts,
    alone: Option<Alone>,
    journal: &mut Journal,
    progress: &dyn Progress,
) -> Result<Driven, ProfilerError> {
    let left: Vec<(usize, &Prompt)> =
        prompts.good.iter().enumerate().filter(|(_, prompt)| !journal.contains(prompt.key)).collect();
    let resumed = prompts.good.len() - left.len();
    let rules = rules(asked.model)?;
    let driven = Driven { bad: prompts.bad.clone(), refused: 0, retries: 0, resumed, self_check: None };
    let mut run = Run::new(driven, asked.options, prompts, left.len(), progress);
    if let Some(alone) = &alone
        && let Some(among) = journal.read(alone.key)?
    {
        run.check(alone, &among, asked.model.top_k)?;
    }
    progress.set_total(prompts.len() as u64);
    progress.advance((resumed + prompts.bad.len()) as u64);
    run.refuse_bad(journal)?;
    let pace = asked.options.rate.map(|rate| {
        let mut interval = tokio::time::interval(Duration::from_secs_f64(1.0 / rate));
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        tokio::sync::Mutex::new(interval)
    });
    let pace = &pace;
    let paced = futures_util::stream::iter(left).then(|record| async move {
        if let Some(interval) = pace {
            interval.lock().await.tick().await;
        }
        record
    });
    let outcomes = paced.map(|(index, prompt)| asked.outcome(index, prompt, &rules));
    let mut answers = std::pin::pin!(outcomes.buffer_unordered(asked.options.concurrency));
    while let Some(outcome) = answers.next().await {
        if let (Some(alone), Ok(among)) = (&alone, &outcome.routed)
            && prompts.good[outcome.index].key == alone.key
        {
            run.check(alone, among, asked.model.top_k)?;
        }
        run.take(outcome, journal)?;
        // Stops once too many responses are bad: if the engine is gone, all others would fail too.
        run.refuse_bad(journal)?;
    }
    if journal.len() == 0 {
        return Err(run.too_many_bad(journal));
    }
    let mut driven = run.driven;
    driven.bad.sort_by_key(|(place, _)| *place);
    Ok(driven)
}

/// The response to a prompt that was sent alone, without the prefix cache.
#[derive(Clone, Debug)]
pub(crate) struct Alone {
    pub(crate) key: PromptKey,
    pub(crate) routed: Routed,
}

/// The inputs shared by all requests.
#[derive(Clone, Copy)]
pub(crate) struct Engine<'a> {
    pub(crate) client: &'a HttpClient,
    pub(crate) options: &'a RecordOptions,
    pub(crate) model: &'a ModelInfo,
}

impl Engine<'_> {
    async fn outcome(&self, index: usize, prompt: &Prompt, rules: &TraceBuilder) -> Outcome {
        let question = self.question(prompt, self.options.max_tokens);
        let mut retries = 0;
        let answer = loop {
            match self.exchange(&question).await {
                Err(error) if retries < self.options.retries && error.worth_retrying() => {
                    retries += 1;
                    let pause = self.options.retry_pause.saturating_mul(1 << (retries - 1).min(16));
                    tokio::time::sleep(pause.min(MAX_PAUSE)).await;
                }
                answer => break answer,
            }
        };
        let refused = answer.as_ref().is_err_and(AnswerError::is_refusal);
        let routed = answer.and_then(|reported| check(rules, &prompt.input, &reported));
        Outcome { index, retries, routed, refused }
    }

    /// Sends a prompt for the first time, without using the prefix cache or filling the cache that the recording uses.
    pub(crate) async fn reported(&self, prompt: &Prompt) -> Result<ReportedAnswer, AnswerError> {
        self.exchange(&uncached(self.options.engine, self.question(prompt, 1))).await
    }

    fn question(&self, prompt: &Prompt, max_tokens: u32) -> Question {
        let temperature = self.options.temperature;
        // Each prompt has its own random seed, reproducible across runs; all engines accept 31 bits.
        let seed = (prompt.key.hash as u64).wrapping_add(prompt.key.occurrence.into()) & 0x7fff_ffff;
        let sampling = Sampling { max_tokens, temperature, seed: (temperature > 0.0).then_some(seed) };
        ask(self.options.engine, self.options.openai_routes, &self.model.model, prompt.asked(), sampling)
    }

    /// Makes one attempt.
    async fn exchange(&self, question: &Question) -> Result<ReportedAnswer, AnswerError> {
        let limits = AnswerLimits { timeout: self.options.request_timeout, max_bytes: MAX_ANSWER_BYTES };
        let path = question.route.path();
        let (_, answer) = self.client.post(&self.options.url, path, &question.body, &limits).await?;
        Ok(read(question.route, &answer)?)
    }
}

/// Progress of the run.
struct Run<'a> {
    driven: Driven,
    prompts: &'a Prompts,
    progress: &'a dyn Progress,
    /// Maximum number of bad records before the recording ends.
    allowed: usize,
    asked: usize,
    answered: usize,
    tokens: u64,
    /// Evaluated over all responses, as a single short response is inconclusive.
    alike: Alike,
    began: Instant,
    spoke: Instant,
}

impl<'a> Run<'a> {
    fn new(
        driven: Driven,
        options: &'a RecordOptions,
        prompts: &'a Prompts,
        asked: usize,
        progress: &'a dyn Progress,
    ) -> Self {
        let began = Instant::now();
        let allowed = allowed_bad(options.max_bad, prompts.len());
        let alike = Alike::default();
        Run { driven, prompts, progress, allowed, asked, answered: 0, tokens: 0, alike, began, spoke: began }
    }

    fn take(&mut self, outcome: Outcome, journal: &mut Journal) -> Result<(), ProfilerError> {
        self.answered += 1;
        self.driven.retries += u64::from(outcome.retries);
        self.driven.refused += usize::from(outcome.refused);
        let prompt = &self.prompts.good[outcome.index];
        match outcome.routed {
            Ok(routed) => {
                self.tokens += routed.token_ids.len() as u64;
                self.alike.add(&routed);
                if let Some(kind) = self.alike.one_route() {
                    return Err(ProfilerError::OneRoute(kind));
                }
                journal.append(prompt.key, &routed)?;
            }
            Err(error) => {
                // Truncated, because some errors quote the engine's response.
                let reason = error.to_string().chars().take(MAX_REASON_CHARS).collect();
                self.driven.bad.push((prompt.place, self.prompts.bad_record(prompt.place, reason)));
            }
        }
        self.report();
        Ok(())
    }

    fn check(&mut self, alone: &Alone, among: &Routed, top_k: u16) -> Result<(), ProfilerError> {
        let check = SelfCheck::of(&alone.routed, among, top_k);
        self.driven.self_check = check;
        match check.filter(SelfCheck::is_wrong) {
            Some(check) => Err(ProfilerError::Unsteady(check)),
            None => Ok(()),
        }
    }

    fn report(&mut self) {
        self.progress.advance(1);
        let last = self.answered == self.asked;
        if !last && self.spoke.elapsed() < MESSAGE_INTERVAL {
            return;
        }
        self.spoke = Instant::now();
        let seconds = self.began.elapsed().as_secs_f64().max(1e-3);
        let left = (self.asked - self.answered) as f64 * seconds / self.answered as f64;
        let speed = self.tokens as f64 / seconds;
        self.progress.message(&format!("{} tokens, {speed:.0} tokens/s, {left:.0} s left", self.tokens));
    }

    /// Ends the recording if too many records are bad. Prompts that the engine rejects do not count, unless it rejects
    /// all of them.
    fn refuse_bad(&self, journal: &Journal) -> Result<(), ProfilerError> {
        let Driven { bad, refused, .. } = &self.driven;
        let refuses_all = journal.len() == 0 && *refused > self.allowed.max(REFUSED_AT_FIRST);
        if bad.len() - refused > self.allowed || refuses_all { Err(self.too_many_bad(journal)) } else { Ok(()) }
    }

    fn too_many_bad(&self, journal: &Journal) -> ProfilerError {
        let first = self.driven.bad.iter().min_by_key(|(place, _)| *place);
        let nothing =
            || BadRecord { file: self.prompts.file.clone(), record: "no record".into(), reason: String::new() };
        let first = Box::new(first.map_or_else(nothing, |(_, bad)| bad.clone()));
        let path = journal.path.display();
        let kept = match journal.len() {
            0 => "nothing was written".to_owned(),
            n => format!("{n} good responses are kept in {path}: run the same command to resume"),
        };
        let (bad, of) = (self.driven.bad.len(), self.prompts.bad.len() + self.answered);
        ProfilerError::TooManyBad { what: "records", bad, of, allowed: self.allowed, first, kept }
    }
}
