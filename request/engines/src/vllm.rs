//! vLLM's dialect: ranks and counters from its metrics, and its rank numbers in pins.
//!
//! vLLM reports its ranks only in `/metrics`, where the label `engine` of a sample is the rank's global number. With
//! several API servers (the default with data parallelism), the gauges of a rank appear with its first request, while
//! counters, histograms and `vllm:cache_config_info` are present from the start; so any `vllm:*` sample proves that a
//! rank exists.
//!
//! A server in front of ranks 4 to 7 accepts pins 0 to 3 (Python front end with `--data-parallel-hybrid-lb`) or 4 to 7
//! (Rust front end). A pin to the last rank's global number distinguishes the two: it is out of range in the first
//! case, and generates one token in the second. For servers in front of rank 0, both numberings agree, so they are not
//! probed.

use std::collections::BTreeMap;

use ::http::{HeaderValue, Method};
use serde::Deserialize;
use serde_json::json;

use crate::http::{AnswerLimits, BaseUrl, HttpClient, HttpError, request};
use crate::metrics::Sample;
use crate::refusal::{self, RankRefusal};
use crate::{RankBase, Route, pin};

/// `GET`: `{"version": "0.33.0"}`.
pub const VERSION: &str = "/version";
/// `GET`: Prometheus text.
pub const METRICS: &str = "/metrics";
/// `GET`: the list of models.
pub const MODELS: &str = "/v1/models";

/// Prefix of vLLM's own metrics.
const PREFIX: &str = "vllm:";
/// Finished requests by prompt length.
const PROMPT_TOKENS: &str = "vllm:request_prompt_tokens_bucket";
/// Finished requests by their output token limit.
const ASKED_TOKENS: &str = "vllm:request_params_max_tokens_bucket";
/// Finished requests.
const FINISHED: &str = "vllm:request_success_total";
/// More ranks than any deployment has. Bounds the memory that metrics can make this process allocate.
const MAX_RANKS: usize = 4096;

/// The counters of one engine (rank). Counters only rise, until the server restarts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineCounts {
    /// Finished requests with a one-token prompt, which clients hardly ever send.
    pub one_token_prompts: Option<u64>,
    /// Finished requests limited to one token.
    pub one_token_answers: Option<u64>,
    /// Finished requests.
    pub finished: Option<u64>,
}

/// The engines behind one server, keyed by their global numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Engines {
    counts: BTreeMap<u16, EngineCounts>,
}

/// Consecutive ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankRange {
    /// Global number of the first rank.
    pub first: u16,
    /// Number of ranks.
    pub count: u16,
}

impl Engines {
    /// Parses Prometheus text; skips other metrics and unreadable lines.
    pub fn parse(metrics: &str) -> Self {
        let mut counts: BTreeMap<u16, EngineCounts> = BTreeMap::new();
        for sample in metrics.lines().filter(|line| line.starts_with(PREFIX)).filter_map(Sample::parse) {
            let Some(engine) = sample.label("engine").and_then(|engine| engine.parse().ok()) else { continue };
            if counts.len() >= MAX_RANKS && !counts.contains_key(&engine) {
                continue;
            }
            let counts = counts.entry(engine).or_default();
            let add = |count: &mut Option<u64>| {
                if (0.0..=1e15).contains(&sample.value) {
                    *count = Some(count.unwrap_or(0).saturating_add(sample.value as u64));
                }
            };
            let is_one = || sample.label("le").and_then(|le| le.parse().ok()) == Some(1.0);
            match sample.name {
                PROMPT_TOKENS if is_one() => add(&mut counts.one_token_prompts),
                ASKED_TOKENS if is_one() => add(&mut counts.one_token_answers),
                FINISHED => add(&mut counts.finished),
                _ => {}
            }
        }
        Self { counts }
    }

    /// Returns the ranks; `None` if there are none, or their numbers have gaps.
    pub fn range(&self) -> Option<RankRange> {
        let (first, last) = (*self.counts.keys().next()?, *self.counts.keys().next_back()?);
        let count = u16::try_from(self.counts.len()).ok()?;
        (last - first == count - 1).then_some(RankRange { first, count })
    }

    /// Returns the counters that probes on a route raise, in rank order. For completions they count one-token prompts,
    /// which clients send most rarely; on other routes, where templates make prompts longer, they count requests for
    /// one token. Falls back to all finished requests if buckets do not begin at 1. `None` if an engine reports none of
    /// these counters.
    pub fn probe_counts(&self, route: Route) -> Option<Vec<u64>> {
        let of =
            |count: fn(&EngineCounts) -> Option<u64>| self.counts.values().map(count).collect::<Option<Vec<u64>>>();
        let rarest = match route {
            Route::Completions => of(|counts| counts.one_token_prompts),
            _ => of(|counts| counts.one_token_answers),
        };
        rarest.or_else(|| of(|counts| counts.finished)).filter(|counts| !counts.is_empty())
    }
}

/// Queries the version; `None` if the server does not report it.
///
/// # Errors
/// [`HttpError`] if the engine does not respond.
pub async fn version(client: &HttpClient, base: &BaseUrl, limits: &AnswerLimits) -> Result<Option<String>, HttpError> {
    #[derive(Deserialize)]
    struct Answer {
        version: String,
    }
    match client.get_json::<Answer>(base, VERSION, limits).await {
        Ok(answer) => Ok(Some(answer.version)),
        Err(HttpError::Status { .. } | HttpError::Json { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Queries the engines; the result is empty if the server has no metrics.
///
/// # Errors
/// [`HttpError`] if the engine does not respond with its metrics.
pub async fn engines(client: &HttpClient, base: &BaseUrl, limits: &AnswerLimits) -> Result<Engines, HttpError> {
    match client.get_text(base, METRICS, limits).await {
        Ok(text) => Ok(Engines::parse(&text)),
        Err(HttpError::Status { .. }) => Ok(Engines::default()),
        Err(error) => Err(error),
    }
}

/// The response of [`MODELS`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Models {
    /// Models in the server's order.
    pub data: Vec<Model>,
}

/// A model in the list of [`MODELS`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Model {
    /// The name that clients use.
    pub id: String,
    /// Directory or hub name of its checkpoint.
    #[serde(default)]
    pub root: Option<String>,
    /// The maximum combined length of prompt and output, in tokens.
    #[serde(default)]
    pub max_model_len: Option<u64>,
}

/// Queries the models of the server: its base models first, then adapters.
///
/// # Errors
/// [`HttpError`] if the engine does not respond with its models.
pub async fn models(client: &HttpClient, base: &BaseUrl, limits: &AnswerLimits) -> Result<Vec<Model>, HttpError> {
    client.get_json::<Models>(base, MODELS, limits).await.map(|models| models.data)
}

/// Queries the server's first model.
///
/// # Errors
/// The errors of [`models`].
pub async fn first_model(
    client: &HttpClient,
    base: &BaseUrl,
    limits: &AnswerLimits,
) -> Result<Option<Model>, HttpError> {
    Ok(models(client, base, limits).await?.into_iter().next())
}

/// Returns whether the server accepts a one-token request for a model of this name. False only if it rejects the name.
///
/// # Errors
/// [`HttpError`] if the server does not respond at all.
pub async fn knows(client: &HttpClient, base: &BaseUrl, name: &str, limits: &AnswerLimits) -> Result<bool, HttpError> {
    let body = json!({ "model": name, "messages": [{ "role": "user", "content": "0" }], "max_tokens": 1 });
    let request = request(Method::POST, base, Route::Chat.path(), Some(body.to_string().into()))?;
    match client.whole(request, limits).await {
        Err(HttpError::Status { status: 404, excerpt, .. }) => Ok(!excerpt.contains(name)),
        Ok(_) | Err(HttpError::Status { .. } | HttpError::Timeout { .. }) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Determines the number of ranks by pinning a request to a rank that no engine has: the server's error states how many
/// there are. `None` if the server does not reject the pin, or states something else.
///
/// # Errors
/// [`HttpError`] if the engine does not respond.
pub async fn pinnable(client: &HttpClient, base: &BaseUrl, limits: &AnswerLimits) -> Result<Option<u16>, HttpError> {
    let refused = pinned_probe(client, base, u32::from(u16::MAX), limits).await?;
    Ok(refused.and_then(Result::err).and_then(|refusal| refusal.ranks).filter(|ranks| *ranks > 0))
}

/// Determines how the server numbers ranks in pins, with a one-token request to the last of its ranks. Requires that
/// its first rank is not rank 0. `None` if the response is inconclusive.
///
/// # Errors
/// [`HttpError`] if the engine does not respond.
pub async fn rank_base(
    client: &HttpClient,
    base: &BaseUrl,
    ranks: RankRange,
    limits: &AnswerLimits,
) -> Result<Option<RankBase>, HttpError> {
    let last = u32::from(ranks.first) + u32::from(ranks.count).saturating_sub(1);
    let answer = pinned_probe(client, base, last, limits).await?;
    Ok(answer.map(|taken| if taken.is_ok() { RankBase::Global } else { RankBase::Local }))
}

/// Sends a one-token request pinned to `rank`, and returns whether it ran or the server has no such rank. `None` if the
/// response is inconclusive.
async fn pinned_probe(
    client: &HttpClient,
    base: &BaseUrl,
    rank: u32,
    limits: &AnswerLimits,
) -> Result<Option<Result<(), RankRefusal>>, HttpError> {
    let Some(model) = first_model(client, base, limits).await? else { return Ok(None) };
    let body = json!({ "model": model.id, "prompt": [1], "max_tokens": 1, "temperature": 0 });
    let mut request = request(Method::POST, base, Route::Completions.path(), Some(body.to_string().into()))?;
    request.headers_mut().insert(pin::HEADER, HeaderValue::from(rank));
    match client.whole(request, limits).await {
        Ok(_) => Ok(Some(Ok(()))),
        Err(HttpError::Status { excerpt, .. }) => Ok(refusal::of_rank(excerpt.as_bytes()).map(Err)),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUSY: &str = "# TYPE vllm:num_requests_running gauge\n\
        vllm:num_requests_running{engine=\"4\",model_name=\"a\"} 2.0\n\
        vllm:request_success_total{engine=\"4\",finished_reason=\"stop\",model_name=\"a\"} 3.0\n\
        vllm:request_success_total{engine=\"4\",finished_reason=\"length\",model_name=\"a\"} 4.0\n\
        vllm:request_success_total{engine=\"5\",finished_reason=\"length\",model_name=\"a\"} NaN\n\
        vllm:request_success_total{engine=\"5\",finished_reason=\"stop\",model_name=\"a\"} 1.0\n\
        vllm:request_prompt_tokens_bucket{engine=\"4\",le=\"1.0\",model_name=\"a\"} 2.0\n\
        vllm:request_prompt_tokens_bucket{engine=\"4\",le=\"10.0\",model_name=\"a\"} 5.0\n\
        vllm:num_requests_running{engine=\"x\"} 1\n\
        other:num_requests_running{engine=\"9\"} 1\n\
        vllm:num_requests_running 8\n";

    #[test]
    fn metrics_report_ranks_and_counts() {
        let engines = Engines::parse(BUSY);
        assert_eq!(engines.range(), Some(RankRange { first: 4, count: 2 }));
        let of = |text: &str, route| Engines::parse(text).probe_counts(route);
        assert_eq!(of(BUSY, Route::Completions), Some(vec![7, 1]), "engine 5 has no bucket of one token");
        let bucket = "vllm:request_prompt_tokens_bucket{engine=\"5\",le=\"1.0\",model_name=\"a\"} 6.0\n";
        assert_eq!(of(&format!("{BUSY}{bucket}"), Route::Completions), Some(vec![2, 6]));
        assert_eq!(of(&format!("{BUSY}{bucket}"), Route::Responses), Some(vec![7, 1]), "prompts of chats are longer");
        let asked = |engine, count| {
            format!(
                "vllm:request_params_max_tokens_bucket{{engine=\"{engine}\",le=\"1.0\",model_name=\"a\"}} {count}\n"
            )
        };
        assert_eq!(of(&format!("{BUSY}{}{}", asked(4, 3), asked(5, 9)), Route::Responses), Some(vec![3, 9]));
        assert_eq!((Engines::parse("").range(), of("", Route::Chat)), (None, None));
        let gap = "vllm:num_requests_running{engine=\"0\"} 0\nvllm:num_requests_running{engine=\"2\"} 0\n";
        assert_eq!((Engines::parse(gap).range(), of(gap, Route::Completions)), (None, None));
    }

    /// A server with several API servers, before its first request: no engine has gauges yet.
    #[test]
    fn a_fresh_server_reports_its_ranks() {
        let fresh = "vllm:prompt_tokens_total{engine=\"0\",model_name=\"tiny\"} 0.0\n\
            vllm:prompt_tokens_total{engine=\"1\",model_name=\"tiny\"} 0.0\n";
        assert_eq!(Engines::parse(fresh).range(), Some(RankRange { first: 0, count: 2 }));
    }
}
