//! vLLM's dialect: what its metrics tell, and how it counts ranks in pins.
//!
//! vLLM says nothing about its ranks but in `/metrics`, where every gauge has a label `engine`: the rank's number among
//! all ranks. A server in front of ranks 4 to 7 takes pins 0 to 3 (Python front end with `--data-parallel-hybrid-lb`) or 4
//! to 7 (Rust front end). A pin to the last rank's global number tells which: it is out of range in the first case, and
//! runs one token in the second. Servers in front of rank 0 count the same either way and are not asked.

use std::collections::BTreeMap;

use ::http::{HeaderValue, Method};
use serde::Deserialize;
use serde_json::json;

use crate::http::{AnswerLimits, BaseUrl, HttpClient, HttpError, request};
use crate::metrics::Sample;
use crate::{RankBase, Route, pin};

/// `GET`: `{"version": "0.33.0"}`.
pub const VERSION: &str = "/version";
/// `GET`: Prometheus text.
pub const METRICS: &str = "/metrics";
/// `GET`: the models by name.
pub const MODELS: &str = "/v1/models";

const RUNNING: &str = "vllm:num_requests_running";
const WAITING: &str = "vllm:num_requests_waiting";
/// More ranks than any deployment has; bounds what metrics can make us allocate.
const MOST_RANKS: usize = 4096;

/// Requests per rank (running and waiting), by the rank's global number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranks {
    in_flight: BTreeMap<u16, u64>,
}

impl Ranks {
    /// Reads Prometheus text; lines of other metrics and lines that cannot be read are passed over.
    pub fn parse(metrics: &str) -> Self {
        let mut in_flight: BTreeMap<u16, u64> = BTreeMap::new();
        for line in metrics.lines() {
            if let Some((rank, requests)) = requests_of_rank(line)
                && (in_flight.len() < MOST_RANKS || in_flight.contains_key(&rank))
            {
                let sum = in_flight.entry(rank).or_default();
                *sum = sum.saturating_add(requests);
            }
        }
        Self { in_flight }
    }

    /// Global number of the first rank behind this server, and how many there are; `None` when there are none, or when
    /// their numbers have gaps.
    pub fn range(&self) -> Option<(u16, u16)> {
        let (first, last) = (*self.in_flight.keys().next()?, *self.in_flight.keys().next_back()?);
        let count = u16::try_from(self.in_flight.len()).ok()?;
        (last - first == count - 1).then_some((first, count))
    }

    /// Running and waiting requests, first rank first.
    pub fn in_flight(&self) -> Vec<u64> {
        self.in_flight.values().copied().collect()
    }
}

/// Rank and value of one line, if it is of a gauge of requests.
fn requests_of_rank(line: &str) -> Option<(u16, u64)> {
    let sample = Sample::parse(line).filter(|sample| [RUNNING, WAITING].contains(&sample.name))?;
    let rank = sample.label("engine")?.parse().ok()?;
    (0.0..=1e15).contains(&sample.value).then_some((rank, sample.value as u64))
}

/// The version, where the server tells.
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

/// The ranks; empty where the server has no metrics.
pub async fn ranks(client: &HttpClient, base: &BaseUrl, limits: &AnswerLimits) -> Result<Ranks, HttpError> {
    match client.get_text(base, METRICS, limits).await {
        Ok(text) => Ok(Ranks::parse(&text)),
        Err(HttpError::Status { .. }) => Ok(Ranks::default()),
        Err(error) => Err(error),
    }
}

/// A model as [`MODELS`] tells it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Model {
    /// The name that clients use.
    pub id: String,
    /// Directory or hub name of its checkpoint.
    #[serde(default)]
    pub root: Option<String>,
    /// The longest prompt and answer together, in tokens.
    #[serde(default)]
    pub max_model_len: Option<u64>,
}

/// The first model of the server: adapters come after it.
pub async fn first_model(
    client: &HttpClient,
    base: &BaseUrl,
    limits: &AnswerLimits,
) -> Result<Option<Model>, HttpError> {
    #[derive(Deserialize)]
    struct Models {
        data: Vec<Model>,
    }
    let models: Models = client.get_json(base, MODELS, limits).await?;
    Ok(models.data.into_iter().next())
}

/// Asks how the server counts ranks in pins, with a request of one token to the last of `count` ranks, the first of
/// which has the global number `first`, more than 0. `None` when its answer does not tell.
pub async fn rank_base(
    client: &HttpClient,
    base: &BaseUrl,
    (first, count): (u16, u16),
    limits: &AnswerLimits,
) -> Result<Option<RankBase>, HttpError> {
    let Some(model) = first_model(client, base, limits).await? else { return Ok(None) };
    let body = json!({ "model": model.id, "prompt": [0], "max_tokens": 1, "temperature": 0 });
    let mut request = request(Method::POST, base, Route::Completions.path(), Some(body.to_string().into()))?;
    let last = u32::from(first) + u32::from(count).saturating_sub(1);
    request.headers_mut().insert(pin::HEADER, HeaderValue::from(last));
    match client.whole(request, limits).await {
        Ok(_) => Ok(Some(RankBase::Global)),
        Err(HttpError::Status { status: 400, excerpt, .. }) if excerpt.contains("is out of range [0, ") => {
            Ok(Some(RankBase::Local))
        }
        Err(HttpError::Status { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# TYPE vllm:num_requests_running gauge\n\
        vllm:num_requests_running{engine=\"4\",model_name=\"a\"} 2.0\n\
        vllm:num_requests_running{engine=\"5\",model_name=\"a\"} 0.0\n\
        vllm:num_requests_waiting{model_name=\"x,engine=\\\"9\\\"} 3\",engine=\"4\"} 1.0\n\
        vllm:num_requests_waiting_by_reason{engine=\"7\"} 1.0\n\
        vllm:num_requests_waiting{engine=\"5\"} NaN\n\
        vllm:num_requests_waiting{engine=\"x\"} 1\n\
        vllm:num_requests_running 8\n";

    #[test]
    fn metrics_tell_ranks_and_loads() {
        let ranks = Ranks::parse(TEXT);
        assert_eq!((ranks.range(), ranks.in_flight()), (Some((4, 2)), vec![3, 0]));
        assert_eq!(Ranks::parse("").range(), None);
        let gap = "vllm:num_requests_running{engine=\"0\"} 0\nvllm:num_requests_running{engine=\"2\"} 0\n";
        assert_eq!(Ranks::parse(gap).range(), None);
    }
}
