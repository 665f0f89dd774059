//! One round of one-token requests that are pinned to known ranks.

use ::http::Method;
use bytes::Bytes;
use semmoe_tables::RankId;
use serde::Deserialize;
use serde_json::{Value, json};

use super::counters::{COUNTED_WITHIN, CounterCheck};
use super::{Comparison, Counters, Evidence, Observation, ProbePlan};
use crate::http::{AnswerLimits, BaseUrl, HttpClient, HttpError, request};
use crate::pin::{self, Stripped};
use crate::refusal::{self, RankRefusal};
use crate::{Dialect, Engine, Route, vllm};

/// The engine whose pins are probed.
#[derive(Clone, Copy, Debug)]
pub struct PinTarget<'a> {
    /// The kind of engine.
    pub engine: Engine,
    /// The engine's URL, or one URL per node.
    pub urls: &'a [BaseUrl],
    /// How to pin requests on this engine.
    pub dialect: &'a Dialect,
    /// The route of the probes: one of [`PROBED`].
    pub route: Route,
}

/// The routes on which an engine may read pins, most used first.
pub const PROBED: [Route; 5] = [Route::Chat, Route::Completions, Route::Generate, Route::Responses, Route::Messages];

/// The reason why a round of probes proved nothing.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Inconclusive {
    /// Neither responses nor counters report ranks.
    #[error("this engine version does not report which rank ran a request")]
    NotReported,
    /// Totals include requests from other clients.
    #[error("other clients send similar requests to the engine, so its totals prove nothing")]
    OtherClients,
    /// The counters did not rise in time.
    #[error("the engine did not count all probes within {COUNTED_WITHIN:?}")]
    NotCounted,
    /// The counters fell.
    #[error("the engine restarted during the probes")]
    Restarted,
    /// The engine has no such rank.
    #[error("the engine refused a probe pinned to rank {}: it has no such rank", .0.rank)]
    Refused(RankRefusal),
    /// A probe failed.
    #[error("a probe failed: {0}")]
    Failed(#[from] HttpError),
}

/// The outcome of a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Round {
    /// The observation for [`PinWatch::observe`](super::PinWatch::observe).
    pub observation: Observation,
    /// One sentence on where the probes were sent and where they ran.
    pub detail: String,
}

/// Sends the probes of `plan`, and determines where they ran. Each generates one token. `limits.timeout` applies to
/// each request.
///
/// # Errors
/// [`Inconclusive`] if the round proves nothing.
pub async fn probe(
    client: &HttpClient,
    target: &PinTarget<'_>,
    plan: &ProbePlan,
    limits: &AnswerLimits,
) -> Result<Round, Inconclusive> {
    let Some(first) = target.urls.first() else { return Err(Inconclusive::NotReported) };
    let model = vllm::first_model(client, first, limits).await?.map(|model| model.id).unwrap_or_default();
    let prober = Prober { client, target, model: &model, limits };
    match target.engine {
        Engine::Sglang | Engine::Semmoe => prober.by_answers(plan).await,
        Engine::Vllm => prober.by_counters(plan).await,
        Engine::Openai => Err(Inconclusive::NotReported),
    }
}

struct Prober<'a> {
    client: &'a HttpClient,
    target: &'a PinTarget<'a>,
    model: &'a str,
    limits: &'a AnswerLimits,
}

impl Prober<'_> {
    async fn by_answers(&self, plan: &ProbePlan) -> Result<Round, Inconclusive> {
        let mut misplaced = None;
        let mut observation = Observation { evidence: Evidence::Probe, agreed: 0, contradicted: 0 };
        for rank in plan.ranks() {
            let answer = self.ask(rank).await?;
            let ran_on = rank_of(&answer).ok_or(Inconclusive::NotReported)?;
            let pinned = self.target.dialect.wire_rank(rank);
            if ran_on == pinned {
                observation.agreed += 1;
            } else {
                observation.contradicted += 1;
                misplaced = misplaced.or(Some((pinned, ran_on)));
            }
        }
        let route = self.target.route;
        let detail = match misplaced {
            None => format!("{} probes on {route} ran where they were pinned", observation.agreed),
            Some((pinned, ran_on)) => format!(
                "{} of {} probes on {route} ran elsewhere; one pinned to rank {pinned} ran on rank {ran_on}",
                observation.contradicted,
                plan.probes(),
            ),
        };
        Ok(Round { observation, detail })
    }

    async fn by_counters(&self, plan: &ProbePlan) -> Result<Round, Inconclusive> {
        let before = self.counts().await?;
        let mut counters = Counters::new(before, &plan.per_rank).ok_or(Inconclusive::NotReported)?;
        for rank in plan.ranks() {
            self.ask(rank).await?;
        }
        let found = loop {
            match counters.check(&self.counts().await?) {
                CounterCheck::Again(pause) => tokio::time::sleep(pause).await,
                CounterCheck::Done(found) => break found,
            }
        };
        match found {
            Comparison::Exact { agreed, contradicted } => {
                let observation = Observation { evidence: Evidence::Counter, agreed, contradicted };
                let probes = plan.probes();
                let route = self.target.route;
                let detail =
                    format!("{contradicted} of {probes} probes on {route} were not counted on the pinned rank");
                Ok(Round { observation, detail })
            }
            Comparison::Waiting => Err(Inconclusive::NotCounted),
            Comparison::OtherClients => Err(Inconclusive::OtherClients),
            Comparison::Restarted => Err(Inconclusive::Restarted),
        }
    }

    /// Returns the counts of probe-like requests, by rank.
    async fn counts(&self) -> Result<Vec<u64>, Inconclusive> {
        let mut all = Vec::new();
        for url in self.target.urls {
            let engines = vllm::engines(self.client, url, self.limits).await?;
            all.extend(engines.probe_counts(self.target.route).ok_or(Inconclusive::NotReported)?);
        }
        Ok(all)
    }

    /// Sends one probe and returns its response.
    async fn ask(&self, rank: RankId) -> Result<Bytes, Inconclusive> {
        let PinTarget { engine, urls, dialect, route } = *self.target;
        let url = urls.get(dialect.url_index(rank)).ok_or(Inconclusive::NotReported)?;
        let body = Bytes::from(probe_body(engine, route, self.model).to_string());
        let Ok(body) = Stripped::new(&body) else { return Err(Inconclusive::NotReported) };
        let mut request = request(Method::POST, url, route.path(), Some(Bytes::new()))?;
        // An engine that reads no pin on this route cannot be probed there.
        let pinned = pin::apply(dialect, route, rank, request.headers_mut(), &body);
        *request.body_mut() = pinned.map_err(|_| Inconclusive::NotReported)?.into();
        let refused = |error: &HttpError| match error {
            HttpError::Status { excerpt, .. } => refusal::of_rank(excerpt.as_bytes()),
            _ => None,
        };
        match self.client.whole(request, self.limits).await {
            Ok((_, answer)) => Ok(answer),
            Err(error) => Err(refused(&error).map_or_else(|| error.into(), Inconclusive::Refused)),
        }
    }
}

/// Builds a request for one token after a one-token prompt or the shortest chat, whose response reports the rank if the
/// engine can. SGLang treats a prompt of token 0 as empty, and on the Responses route it generates two tokens fewer
/// than allowed.
fn probe_body(engine: Engine, route: Route, model: &str) -> Value {
    let most_tokens = if engine == Engine::Sglang { 3 } else { 1 };
    let messages = json!([{ "role": "user", "content": "0" }]);
    match route {
        Route::Generate => {
            json!({ "input_ids": [0], "sampling_params": { "max_new_tokens": 1, "temperature": 0 } })
        }
        Route::Chat => json!({
            "model": model, "messages": messages, "max_tokens": 1, "temperature": 0, "return_meta_info": true
        }),
        Route::Responses => json!({
            "model": model, "input": "0", "max_output_tokens": most_tokens, "temperature": 0, "store": false
        }),
        Route::Messages => json!({ "model": model, "messages": messages, "max_tokens": 1, "temperature": 0 }),
        _ => json!({ "model": model, "prompt": [1], "max_tokens": 1, "temperature": 0 }),
    }
}

/// Returns the rank reported in an SGLang response, in the engine's numbering: `meta_info.dp_rank` of `/generate`, or
/// `choices[0].meta_info.dp_rank` of a chat.
fn rank_of(answer: &[u8]) -> Option<u32> {
    #[derive(Deserialize)]
    struct Meta {
        dp_rank: Option<u32>,
    }
    #[derive(Deserialize)]
    struct Choice {
        meta_info: Option<Meta>,
    }
    #[derive(Deserialize)]
    struct Answer {
        meta_info: Option<Meta>,
        #[serde(default)]
        choices: Vec<Choice>,
    }
    let Answer { meta_info, choices } = serde_json::from_slice(answer).ok()?;
    meta_info.or_else(|| choices.into_iter().next()?.meta_info)?.dp_rank
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_name_ranks() {
        for (answer, rank) in [
            (r#"{"text":"","meta_info":{"dp_rank":3}}"#, Some(3)),
            (r#"{"choices":[{"message":{},"meta_info":{"dp_rank":1,"id":"x"}}]}"#, Some(1)),
            (r#"{"choices":[{"message":{}}]}"#, None),
            (r#"{"meta_info":{"dp_rank":null}}"#, None),
            ("[]", None),
            ("", None),
        ] {
            assert_eq!(rank_of(answer.as_bytes()), rank, "{answer}");
        }
    }
}
