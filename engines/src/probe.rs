//! What an engine says about itself: health, version, ranks, and for SGLang's dialect its server information.
//!
//! SGLang's `/health` runs the model for one token, so it takes a second on an idle engine and as long as a step of prefill
//! on a busy one. `/ping` is answered by the HTTP server alone. So [`alive`] asks `/ping` and decides about the process, and
//! [`health`] decides about the scheduler behind it, with a limit of time to match.

use std::time::Duration;

use crate::http::{AnswerLimits, BaseUrl, HttpClient, HttpError};
use crate::sglang::{self, ServerInfo};
use crate::{Dialect, Engine, RankBase, Version, vllm};

/// What to probe.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// The kind of engine.
    pub engine: Engine,
    /// One URL, or one for each rank.
    pub urls: &'a [BaseUrl],
    /// How the engine counts ranks in pins, where that is known already.
    pub rank_base: Option<RankBase>,
}

impl<'a> Target<'a> {
    /// An engine behind one URL of which nothing else is known.
    pub fn new(engine: Engine, url: &'a BaseUrl) -> Self {
        Self { engine, urls: std::slice::from_ref(url), rank_base: None }
    }
}

/// Where an engine answers whether it can serve.
pub fn health_path(engine: Engine) -> &'static str {
    match engine {
        Engine::Sglang | Engine::Semmoe | Engine::Vllm => sglang::HEALTH,
        // The only GET route that every server with the OpenAI routes has.
        Engine::Openai => "/v1/models",
    }
}

/// Whether the health route of this engine runs the model.
pub fn health_generates(engine: Engine) -> bool {
    engine == Engine::Sglang
}

/// Whether a failed health probe says that the engine cannot recover, so that no second probe is needed. vLLM's API servers
/// answer 503 only when the engine core is dead.
pub fn is_dead(engine: Engine, error: &HttpError) -> bool {
    engine == Engine::Vllm && error.status() == Some(503)
}

/// Asks every URL whether its HTTP server answers, without running the model. Where the server says no, or has no such
/// route, its health route decides, which may take as long as `busy`.
///
/// # Errors
/// As [`health`].
pub async fn alive(
    client: &HttpClient,
    target: &Target<'_>,
    limits: &AnswerLimits,
    busy: Duration,
) -> Result<(), HttpError> {
    if !health_generates(target.engine) {
        return health(client, target, limits).await;
    }
    for url in target.urls {
        let answer = client.get_text(url, sglang::PING, limits).await;
        if !answer.as_ref().is_err_and(|error| error.status().is_some()) {
            answer?;
            continue;
        }
        let patient = AnswerLimits { timeout: busy.max(limits.timeout), ..*limits };
        client.get_text(url, sglang::HEALTH, &patient).await?;
    }
    Ok(())
}

/// Asks every URL for health alone; any 2xx answer is good. The ranks of an engine move in lockstep, so that one without
/// one of them is not healthy.
pub async fn health(client: &HttpClient, target: &Target<'_>, limits: &AnswerLimits) -> Result<(), HttpError> {
    for url in target.urls {
        client.get_text(url, health_path(target.engine), limits).await?;
    }
    Ok(())
}

/// What a probe found.
#[derive(Clone, Debug, PartialEq)]
pub struct Probe {
    /// Server information, where the engine gives any.
    pub server: Option<ServerInfo>,
    /// As the engine tells it.
    pub version: Option<String>,
    /// Attention-DP ranks a request can be sent to; `None` when the engine does not tell.
    pub dp_size: Option<u16>,
    /// How it is pinned.
    pub dialect: Dialect,
    /// The engine has further ranks before those behind its URL, and did not tell how it counts in pins.
    pub unknown_rank_base: bool,
}

impl Probe {
    fn of(engine: Engine, version: Option<String>, dp_size: Option<u16>) -> Self {
        let dialect = Dialect::of(engine, version.as_deref().and_then(Version::parse));
        Self { server: None, version, dp_size, dialect, unknown_rank_base: false }
    }
}

/// Health, then everything else the engine tells.
///
/// # Errors
/// When a URL does not answer, or answers otherwise than such an engine does.
pub async fn probe(client: &HttpClient, target: &Target<'_>, limits: &AnswerLimits) -> Result<Probe, HttpError> {
    // SGLang's server information comes from its schedulers, so a hung one fails below.
    alive(client, target, limits, limits.timeout).await?;
    let Some(first) = target.urls.first() else { return Ok(Probe::of(target.engine, None, None)) };
    let mut found = match target.engine {
        Engine::Sglang | Engine::Semmoe => {
            let info = server_info(client, first, limits).await?;
            Probe { server: Some(info.clone()), ..Probe::of(target.engine, info.version.clone(), info.dp_size) }
        }
        Engine::Vllm => probe_vllm(client, first, target, limits).await?,
        Engine::Openai => Probe::of(target.engine, None, Some(1)),
    };
    if target.urls.len() > 1 {
        found.dp_size = u16::try_from(target.urls.len()).ok();
        found.dialect = Dialect::by_url(target.engine);
    }
    Ok(found)
}

async fn probe_vllm(
    client: &HttpClient,
    base: &BaseUrl,
    target: &Target<'_>,
    limits: &AnswerLimits,
) -> Result<Probe, HttpError> {
    let version = vllm::version(client, base, limits).await?;
    if target.urls.len() > 1 {
        return Ok(Probe::of(target.engine, version, None));
    }
    let range = vllm::ranks(client, base, limits).await?.range();
    let mut found = Probe::of(target.engine, version, range.map(|(_, count)| count));
    let Some((first, count)) = range.filter(|(first, _)| *first > 0) else { return Ok(found) };
    let rank_base = match target.rank_base {
        None => vllm::rank_base(client, base, (first, count), limits).await?,
        known => known,
    };
    match rank_base {
        Some(RankBase::Global) => found.dialect = found.dialect.with_first_rank(first),
        Some(RankBase::Local) => {}
        None => found.unknown_rank_base = true,
    }
    Ok(found)
}

/// Server information of an engine that speaks SGLang's dialect, under whichever name this version has it.
pub async fn server_info(client: &HttpClient, base: &BaseUrl, limits: &AnswerLimits) -> Result<ServerInfo, HttpError> {
    match client.get_json(base, sglang::SERVER_INFO, limits).await {
        Err(error) if error.status() == Some(404) => client.get_json(base, sglang::GET_SERVER_INFO, limits).await,
        answer => answer,
    }
}
