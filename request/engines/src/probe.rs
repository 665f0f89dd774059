//! An engine's report about itself: health, version, ranks, and for SGLang's dialect its server information.
//!
//! SGLang's `/health` runs the model for one token, so it takes a second on an idle engine and as long as a step of
//! prefill on a busy one. `/ping` is answered by the HTTP server alone. So [`alive`] asks `/ping` and decides about the
//! process, and [`health`] decides about the scheduler behind it, with a limit of time to match.

use std::sync::Arc;
use std::time::Duration;

use crate::http::{AnswerLimits, BaseUrl, HttpClient, HttpError};
use crate::rendering::Rendering;
use crate::sglang::{self, Loads, ServerInfo, ShownPlacement, Unseen};
use crate::vllm::RankRange;
use crate::{Dialect, Engine, RankBase, Version, vllm};

/// The engine to probe.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// The kind of engine.
    pub engine: Engine,
    /// One URL, or one for each rank.
    pub urls: &'a [BaseUrl],
    /// How the engine counts ranks in pins, where that is known already.
    pub rank_base: Option<RankBase>,
    /// Names that requests will call the model by; without any it is not asked which model it serves.
    pub names: &'a [String],
}

impl<'a> Target<'a> {
    /// An engine behind one URL of which nothing else is known.
    pub fn new(engine: Engine, url: &'a BaseUrl) -> Self {
        Self { engine, urls: std::slice::from_ref(url), rank_base: None, names: &[] }
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

/// Whether the health route of this engine says at once whether what computes behind the server is alive.
pub fn health_knows_core(engine: Engine) -> bool {
    matches!(engine, Engine::Vllm | Engine::Semmoe)
}

/// Whether this status of the health route says that the engine serves nothing more, so that no second probe is needed.
/// vLLM's API servers answer 503 there only when the engine core is dead, this project's worker when a rank is lost or
/// it drains.
pub fn is_dead(engine: Engine, status: Option<u16>) -> bool {
    health_knows_core(engine) && status == Some(503)
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

/// Asks every URL for health alone; any 2xx answer is good. The ranks of an engine move in lockstep, so that one
/// without one of them is not healthy.
///
/// # Errors
/// `HttpError` where the engine does not answer with 200.
pub async fn health(client: &HttpClient, target: &Target<'_>, limits: &AnswerLimits) -> Result<(), HttpError> {
    for url in target.urls {
        client.get_text(url, health_path(target.engine), limits).await?;
    }
    Ok(())
}

/// Asks every URL of an engine of SGLang's dialect for something that its schedulers must answer. An answer of any
/// status is good: what it says is not judged here.
///
/// # Errors
/// When a URL does not answer.
pub async fn schedulers(client: &HttpClient, target: &Target<'_>, limits: &AnswerLimits) -> Result<(), HttpError> {
    for url in target.urls {
        match server_info(client, url, limits).await {
            Err(error @ HttpError::Timeout { .. }) => return Err(error),
            Err(error) if !error.may_have_been_sent() => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// The outcome of a probe.
#[derive(Clone, Debug, PartialEq)]
pub struct Probe {
    /// Server information, where the engine gives any.
    pub server: Option<ServerInfo>,
    /// As the engine reports it.
    pub version: Option<String>,
    /// Attention-DP ranks a request can be sent to; `None` when the engine does not report them, or contradicts itself.
    pub dp_size: Option<u16>,
    /// Why `dp_size` is unknown, where something is wrong rather than absent.
    pub doubt: Option<RankDoubt>,
    /// How it is pinned.
    pub dialect: Dialect,
    /// The engine has further ranks before those behind its URL, and did not report how it counts in pins.
    pub unknown_rank_base: bool,
    /// The placement that an engine of SGLang's dialect shows.
    pub placement: Result<ShownPlacement, Unseen>,
    /// The longest prompt and answer together, in tokens, where its list of models says so.
    pub max_model_len: Option<u64>,
    /// A model that it serves in place of the one that requests name, which it knows no model for.
    pub other_model: Option<String>,
    /// Its token ids of the built-in chats, where it was asked for them.
    pub rendering: Option<Arc<Rendering>>,
}

/// Why an engine's number of ranks is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RankDoubt {
    /// Two routes report different numbers.
    #[error("{info_route} reports {info} attention-DP ranks, but {loads_route} {loads}", info_route = sglang::SERVER_INFO, loads_route = sglang::LOADS)]
    Routes {
        /// By the server information.
        info: u16,
        /// By the loads.
        loads: usize,
    },
    /// The server information is not of a known form.
    #[error("the engine's {} is not what any known version answers: {cause}", sglang::SERVER_INFO)]
    Unreadable {
        /// Of the JSON parser.
        cause: String,
    },
    /// No ranks at all.
    #[error("the engine reports 0 attention-DP ranks")]
    Zero,
    /// URLs of one engine report ranks that do not follow each other.
    #[error(
        "URL {url} serves {} ranks from rank {}, expected {} from rank {}: list `urls` in the order of their ranks",
        found.count, found.first, expected.count, expected.first
    )]
    Nodes {
        /// Index of the URL.
        url: usize,
        /// The ranks that it reports.
        found: RankRange,
        /// The ranks that should follow.
        expected: RankRange,
    },
    /// A URL reports no ranks, so that it is unknown which are behind the others.
    #[error("URL {url} reports no ranks in its metrics")]
    Silent {
        /// Index of the URL.
        url: usize,
    },
}

impl Probe {
    fn of(engine: Engine, version: Option<String>, dp_size: Option<u16>) -> Self {
        let dialect = Dialect::of(engine, version.as_deref().and_then(Version::parse));
        Self {
            server: None,
            version,
            dp_size,
            doubt: None,
            dialect,
            unknown_rank_base: false,
            placement: Err(Unseen::Unreported),
            max_model_len: None,
            other_model: None,
            rendering: None,
        }
    }

    /// Takes over the placement that was read from a file before, if this is the same process: the file may have been
    /// written again since.
    pub fn keep_placement(&mut self, before: &Self) {
        let process = |probe: &Self| {
            let server = probe.server.as_ref()?;
            Some((server.random_seed?, server.init_expert_location.clone()?))
        };
        if before.placement.is_ok() && process(self).is_some_and(|now| process(before) == Some(now)) {
            self.placement.clone_from(&before.placement);
        }
    }

    /// The same with an unknown number of ranks.
    fn doubtful(self, doubt: RankDoubt) -> Self {
        Self { dp_size: None, doubt: Some(doubt), ..self }
    }
}

/// Health, then everything else the engine reports.
///
/// # Errors
/// When a URL does not answer, or answers otherwise than such an engine does.
pub async fn probe(client: &HttpClient, target: &Target<'_>, limits: &AnswerLimits) -> Result<Probe, HttpError> {
    // SGLang's server information comes from its schedulers, so a hung one fails below.
    alive(client, target, limits, limits.timeout).await?;
    if target.urls.is_empty() {
        return Ok(Probe::of(target.engine, None, None));
    }
    let mut found = match target.engine {
        Engine::Sglang | Engine::Semmoe => probe_sglang(client, target, limits).await?,
        Engine::Vllm if target.urls.len() > 1 => probe_nodes(client, target, limits).await?,
        Engine::Vllm => probe_vllm(client, target, limits).await?,
        Engine::Openai => by_url(Probe::of(target.engine, None, Some(1)), target),
    };
    if !target.names.is_empty() {
        probe_models(client, target, limits, &mut found).await?;
    }
    Ok(found)
}

/// Asks which models the engine lists. Some engines answer to any name, so that one that lists other models only is
/// asked by the name that requests have.
async fn probe_models(
    client: &HttpClient,
    target: &Target<'_>,
    limits: &AnswerLimits,
    found: &mut Probe,
) -> Result<(), HttpError> {
    let Target { urls: [base, ..], names: [name, ..], .. } = target else { return Ok(()) };
    let models = match vllm::models(client, base, limits).await {
        // It has no such route. vLLM asks for its key here, but not on the routes before.
        Err(HttpError::Status { status, .. }) if !matches!(status, 401 | 403) => return Ok(()),
        Err(HttpError::Json { .. }) => return Ok(()),
        models => models?,
    };
    let Some(first) = models.first() else { return Ok(()) };
    found.max_model_len = first.max_model_len;
    if !models.iter().any(|model| target.names.contains(&model.id)) && !vllm::knows(client, base, name, limits).await? {
        found.other_model = Some(first.id.chars().take(200).collect());
    }
    Ok(())
}

/// With several URLs, each is one rank.
fn by_url(found: Probe, target: &Target<'_>) -> Probe {
    if target.urls.len() == 1 {
        return found;
    }
    Probe { dp_size: u16::try_from(target.urls.len()).ok(), dialect: Dialect::by_url(target.engine), ..found }
}

async fn probe_sglang(client: &HttpClient, target: &Target<'_>, limits: &AnswerLimits) -> Result<Probe, HttpError> {
    let base = &target.urls[0];
    let info = match server_info(client, base, limits).await {
        Ok(info) => info,
        Err(HttpError::Json { cause, .. }) => {
            return Ok(Probe::of(target.engine, None, None).doubtful(RankDoubt::Unreadable { cause }));
        }
        Err(error) => return Err(error),
    };
    let ranks = info.ranks();
    let placement = info.shown_placement(limits.timeout).await;
    let found = Probe { server: Some(info.clone()), placement, ..Probe::of(target.engine, info.version, ranks) };
    if ranks == Some(0) {
        return Ok(found.doubtful(RankDoubt::Zero));
    }
    let Some(info) = ranks.filter(|_| target.urls.len() == 1 && target.engine == Engine::Sglang) else {
        return Ok(by_url(found, target));
    };
    match client.get_json::<Loads>(base, sglang::LOADS, limits).await {
        Ok(loads) if loads.loads.len() != usize::from(info) => {
            Ok(found.doubtful(RankDoubt::Routes { info, loads: loads.loads.len() }))
        }
        // Before 0.5.8 there is no such route.
        Ok(_) | Err(HttpError::Status { .. } | HttpError::Json { .. }) => Ok(found),
        Err(error) => Err(error),
    }
}

async fn probe_vllm(client: &HttpClient, target: &Target<'_>, limits: &AnswerLimits) -> Result<Probe, HttpError> {
    let base = &target.urls[0];
    let version = vllm::version(client, base, limits).await?;
    let range = vllm::engines(client, base, limits).await?.range();
    let ranks = match range {
        Some(range) => Some(range.count),
        // An engine that does not answer this either is one of unknown ranks.
        None => vllm::pinnable(client, base, limits).await.unwrap_or(None),
    };
    let mut found = Probe::of(target.engine, version, ranks);
    let Some(range) = range.filter(|range| range.first > 0) else { return Ok(found) };
    match rank_base(client, base, target, range, limits).await? {
        Some(RankBase::Global) => found.dialect = found.dialect.with_first_rank(range.first),
        Some(RankBase::Local) => {}
        None => found.unknown_rank_base = true,
    }
    Ok(found)
}

/// vLLM with one URL for each node: hybrid load balancing, where each API server is in front of its node's ranks. One
/// rank on each is external load balancing, where the URL alone is the pin.
async fn probe_nodes(client: &HttpClient, target: &Target<'_>, limits: &AnswerLimits) -> Result<Probe, HttpError> {
    let mut nodes = Vec::new();
    for url in target.urls {
        nodes.push(vllm::engines(client, url, limits).await?.range());
    }
    let found = Probe::of(target.engine, vllm::version(client, &target.urls[0], limits).await?, None);
    let on_a_node = nodes.iter().flatten().map(|range| range.count).max().unwrap_or(1);
    if on_a_node == 1 {
        return Ok(by_url(found, target));
    }
    for (url, range) in nodes.iter().enumerate() {
        let Some(range) = *range else { return Ok(found.doubtful(RankDoubt::Silent { url })) };
        let first = u16::try_from(url).unwrap_or(u16::MAX).saturating_mul(on_a_node);
        let expected = RankRange { first, count: on_a_node };
        if range != expected {
            return Ok(found.doubtful(RankDoubt::Nodes { url, found: range, expected }));
        }
    }
    let second = RankRange { first: on_a_node, count: on_a_node };
    let Some(rank_base) = rank_base(client, &target.urls[1], target, second, limits).await? else {
        return Ok(Probe { unknown_rank_base: true, ..found });
    };
    let ranks = usize::from(on_a_node) * nodes.len();
    Ok(Probe { dp_size: u16::try_from(ranks).ok(), dialect: found.dialect.with_nodes(on_a_node, rank_base), ..found })
}

async fn rank_base(
    client: &HttpClient,
    base: &BaseUrl,
    target: &Target<'_>,
    range: RankRange,
    limits: &AnswerLimits,
) -> Result<Option<RankBase>, HttpError> {
    match target.rank_base {
        None => vllm::rank_base(client, base, range, limits).await,
        known => Ok(known),
    }
}

/// Server information of an engine that speaks SGLang's dialect, under whichever name this version has it.
///
/// # Errors
/// `HttpError` where the engine does not answer, or with something else.
pub async fn server_info(client: &HttpClient, base: &BaseUrl, limits: &AnswerLimits) -> Result<ServerInfo, HttpError> {
    match client.get_json(base, sglang::SERVER_INFO, limits).await {
        Err(error) if error.status() == Some(404) => client.get_json(base, sglang::GET_SERVER_INFO, limits).await,
        answer => answer,
    }
}
