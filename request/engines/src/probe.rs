//! Queries an engine's health, version and ranks and, in SGLang's dialect, its server information.
//!
//! SGLang's `/health` runs the model for one token, so it takes a second on an idle engine and as long as a prefill
//! step on a busy one. The HTTP server answers `/ping` by itself. [`alive`] therefore uses `/ping` to check the
//! process, and [`health`] checks the scheduler behind it, with a suitable time limit.

use std::sync::Arc;
use std::time::Duration;

use crate::http::{AnswerLimits, BaseUrl, HttpClient, HttpError};
use crate::rendering::Rendering;
use crate::sglang::{self, Loads, ServerInfo, ShownPlacement, Unseen};
use crate::vllm::RankRange;
use crate::{Dialect, Engine, RankBase, SharedError, Version, vllm};

/// The engine to probe.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// The kind of engine.
    pub engine: Engine,
    /// The engine's URL, or one URL per rank.
    pub urls: &'a [BaseUrl],
    /// How the engine numbers ranks in pins, if known.
    pub rank_base: Option<RankBase>,
    /// Model names that requests will use; if there are none, the engine's models are not queried.
    pub names: &'a [String],
}

impl<'a> Target<'a> {
    /// Creates a target for an engine behind one URL, with nothing else known about it.
    pub fn new(engine: Engine, url: &'a BaseUrl) -> Self {
        Self { engine, urls: std::slice::from_ref(url), rank_base: None, names: &[] }
    }
}

/// Returns the route that reports whether an engine can serve.
pub fn health_path(engine: Engine) -> &'static str {
    match engine {
        Engine::Sglang | Engine::Semmoe | Engine::Vllm => sglang::HEALTH,
        // The only GET route that every OpenAI-compatible server has.
        Engine::Openai => "/v1/models",
    }
}

/// Returns whether this engine's health route runs the model.
pub fn health_generates(engine: Engine) -> bool {
    engine == Engine::Sglang
}

/// Returns whether this engine's health route immediately reports whether the model processes are alive.
pub fn health_knows_core(engine: Engine) -> bool {
    matches!(engine, Engine::Vllm | Engine::Semmoe)
}

/// Returns whether this status of the health route means that the engine no longer serves requests, so that no second
/// probe is needed. vLLM's API servers return 503 there only if the engine core is dead; semmoe's worker does so if a
/// rank is lost or the worker is draining.
pub fn is_dead(engine: Engine, status: Option<u16>) -> bool {
    health_knows_core(engine) && status == Some(503)
}

/// Checks that the HTTP server at every URL responds, without running the model. If it reports a failure or has no such
/// route, its health route decides, which may take up to `busy`.
///
/// # Errors
/// The errors of [`health`].
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

/// Checks only the health route of every URL; any 2xx status counts as healthy. The ranks of an engine run in lockstep,
/// so the engine is unhealthy if any of them is.
///
/// # Errors
/// [`HttpError`] if the engine does not respond with 2xx.
pub async fn health(client: &HttpClient, target: &Target<'_>, limits: &AnswerLimits) -> Result<(), HttpError> {
    for url in target.urls {
        client.get_text(url, health_path(target.engine), limits).await?;
    }
    Ok(())
}

/// Sends every URL of an engine with SGLang's dialect a request that its schedulers must answer. Any response counts as
/// success, whatever its status or content.
///
/// # Errors
/// If a URL does not respond.
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
    /// Server information, if the engine provides it.
    pub server: Option<ServerInfo>,
    /// The version that the engine reports.
    pub version: Option<String>,
    /// Number of attention-DP ranks that a request can be sent to; `None` if the engine does not report it or
    /// contradicts itself.
    pub dp_size: Option<u16>,
    /// Why `dp_size` is unknown, if the engine's report is wrong rather than missing.
    pub doubt: Option<RankDoubt>,
    /// How to pin requests on this engine.
    pub dialect: Dialect,
    /// Whether the engine has further ranks before those behind its URL but did not report how it numbers them in pins.
    pub unknown_rank_base: bool,
    /// The placement reported by an engine with SGLang's dialect.
    pub placement: Result<ShownPlacement, Unseen>,
    /// The maximum combined length of prompt and output, in tokens, if stated in the engine's model list.
    pub max_model_len: Option<u64>,
    /// A model that the engine serves, if it does not know the model that requests name.
    pub other_model: Option<String>,
    /// The engine's token ids for the built-in chats, if queried.
    pub rendering: Option<Arc<Rendering>>,
}

/// The reason why an engine's number of ranks is unknown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RankDoubt {
    /// Two routes report different numbers of ranks.
    #[error("{info_route} reports {info} attention-DP ranks, but {loads_route} reports {loads}", info_route = sglang::SERVER_INFO, loads_route = sglang::LOADS)]
    Routes {
        /// Number of ranks in the server information.
        info: u16,
        /// Number of ranks in the loads.
        loads: usize,
    },
    /// The server information has an unknown format.
    #[error("the engine's {} does not match any known version: {source}", sglang::SERVER_INFO, source = .0)]
    Unreadable(#[source] SharedError),
    /// No ranks at all.
    #[error("the engine reports 0 attention-DP ranks")]
    Zero,
    /// The URLs of one engine report ranks that are not consecutive.
    #[error(
        "URL {url} serves {} ranks from rank {}, expected {} from rank {}: list `urls` in rank order",
        found.count, found.first, expected.count, expected.first
    )]
    Nodes {
        /// Index of the URL.
        url: usize,
        /// The ranks that it reports.
        found: RankRange,
        /// The ranks expected next.
        expected: RankRange,
    },
    /// A URL reports no ranks, so the ranks behind the other URLs are unknown.
    #[error("URL {0} reports no ranks in its metrics")]
    Silent(usize),
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

    /// Keeps the placement that an earlier probe read from a file, if the engine is still the same process: the file
    /// may have been rewritten since.
    pub fn keep_placement(&mut self, before: &Self) {
        let process = |probe: &Self| {
            let server = probe.server.as_ref()?;
            Some((server.random_seed?, server.init_expert_location.clone()?))
        };
        if before.placement.is_ok() && process(self).is_some_and(|now| process(before) == Some(now)) {
            self.placement.clone_from(&before.placement);
        }
    }

    /// Returns the probe with its number of ranks marked as unknown.
    fn doubtful(self, doubt: RankDoubt) -> Self {
        Self { dp_size: None, doubt: Some(doubt), ..self }
    }
}

/// Checks health, then reads everything else that the engine reports.
///
/// # Errors
/// If a URL does not respond, or responds unlike this kind of engine.
pub async fn probe(client: &HttpClient, target: &Target<'_>, limits: &AnswerLimits) -> Result<Probe, HttpError> {
    // SGLang's server information requires its schedulers, so a hung scheduler fails the query below.
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

/// Queries the models that the engine lists. Some engines accept any name, so if an engine lists only other models, the
/// name that requests use is tried on it.
async fn probe_models(
    client: &HttpClient,
    target: &Target<'_>,
    limits: &AnswerLimits,
    found: &mut Probe,
) -> Result<(), HttpError> {
    let Target { urls: [base, ..], names: [name, ..], .. } = target else { return Ok(()) };
    let models = match vllm::models(client, base, limits).await {
        // The engine has no such route. A 401 or 403 is an error: vLLM requires its key here, unlike on earlier routes.
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

/// Treats each URL as one rank if there are several.
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
        Err(HttpError::Json { source, .. }) => {
            return Ok(Probe::of(target.engine, None, None).doubtful(RankDoubt::Unreadable(source)));
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
        // SGLang before 0.5.8 has no such route.
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
        // If this query fails too, the engine's ranks remain unknown.
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

/// Probes vLLM with one URL per node: hybrid load balancing, where each API server fronts the ranks of its node. One
/// rank per node is external load balancing, where the URL itself is the pin.
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
        let Some(range) = *range else { return Ok(found.doubtful(RankDoubt::Silent(url))) };
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

/// Queries the server information of an engine with SGLang's dialect, on whichever route its version has.
///
/// # Errors
/// [`HttpError`] if the engine does not respond, or responds with something else.
pub async fn server_info(client: &HttpClient, base: &BaseUrl, limits: &AnswerLimits) -> Result<ServerInfo, HttpError> {
    match client.get_json(base, sglang::SERVER_INFO, limits).await {
        Err(error) if error.status() == Some(404) => client.get_json(base, sglang::GET_SERVER_INFO, limits).await,
        answer => answer,
    }
}
