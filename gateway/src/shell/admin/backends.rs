//! `GET /admin/backends`, `POST /admin/backends/{name}/drain` and `/undrain`.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::{Path, State};
use schemars::JsonSchema;
use semmoe_engines::verify::Evidence;
use semmoe_engines::{Dialect, Route};
use semmoe_text::Shapes;
use serde::Serialize;

use crate::backends::compat::placement_source;
use crate::backends::health::SILENT;
use crate::backends::parity::known::Known;
use crate::backends::{Aside, Fit, Health, Member, Model, PinState, RequestError, RouteState, Run};
use crate::shell::control::Control;

#[derive(Serialize, JsonSchema)]
pub(super) struct Backends {
    generation: u64,
    backends: Vec<Backend>,
    /// Drained backends that are currently absent; they stay drained if they return.
    drained_absent: Vec<Absent>,
}

#[derive(Serialize, JsonSchema)]
struct Absent {
    name: String,
    /// Seconds since the backend left; its drain is forgotten after a day.
    seconds: f64,
}

#[derive(Serialize, JsonSchema)]
struct Backend {
    model: String,
    policy: &'static str,
    name: String,
    engine: &'static str,
    /// The first URL.
    url: String,
    /// All URLs, if each rank has its own.
    urls: Vec<String>,
    /// The version that the engine reports.
    version: Option<String>,
    /// Source of the placement digest: `engine`, `configuration`, `tables` (assumed, not verified) or `unknown`.
    placement_by: &'static str,
    pins: Pins,
    chats: Chats,
    healthy: bool,
    /// Why requests are routed by load rather than pinned, although the backend serves.
    by_load: Option<ByLoad>,
    /// Why the backend receives no requests, or only if no other backend is available.
    cause: Option<String>,
    /// The backend finishes its requests and receives no new ones.
    draining: bool,
    /// Requests in flight.
    in_flight_requests: u64,
    breaker: Breaker,
    ranks: Vec<Rank>,
}

#[derive(Serialize, JsonSchema)]
struct ByLoad {
    /// The unknown or mismatched part: `ranks`, `ranks unknown`, `layout`, `placement`, `placement unproven`,
    /// `tokenizer`, `tables`, `file`.
    reason: &'static str,
    /// One sentence.
    detail: String,
}

#[derive(Serialize, JsonSchema)]
struct Breaker {
    /// `closed`, `half open` or `open` (no requests).
    state: &'static str,
    /// Consecutive failures.
    failures: u32,
    /// Consecutive errors. Identical requests count once, unless another backend has answered one of them successfully.
    errors: u32,
    /// Recent openings.
    openings: u32,
    /// Seconds until the backend is tried again.
    open_seconds: Option<f64>,
}

/// The response to `drain` and `undrain`.
#[derive(Serialize, JsonSchema)]
pub(super) struct Drained {
    name: String,
    draining: bool,
    in_flight_requests: u64,
}

/// The verdict over all routes: decided by a route on which pins are ignored, if any, otherwise by the route with the
/// latest evidence.
#[derive(Serialize, JsonSchema)]
struct Pins {
    /// `unverified`, `honoured`, `pin ignored` or `not pinned` (requests are routed by load), `by url`, or `one rank`.
    state: &'static str,
    /// Number of requests and probes that ran on the rank they were pinned to.
    agreed: u64,
    /// Number of requests and probes that ran on a rank other than the pinned one.
    contradicted: u64,
    /// The kind of evidence: `answers`, `probes` or `counters`.
    evidence: Option<&'static str>,
    /// Describes the last contradiction, or else the outcome of the last probe round; or why nothing is known.
    detail: Option<String>,
    /// Routes on which the engine accepts pins, if it has several ranks.
    routes: Vec<PinnedRoute>,
}

/// Whether the engine tokenizes chats as the gateway does; chats with differing shapes are routed by load.
#[derive(Serialize, JsonSchema)]
struct Chats {
    /// `equal`, `differs`, or `unproven`: the engine does not expose its token ids for chats, so chats keep their
    /// affinity.
    state: &'static str,
    /// The engine route that provided the evidence.
    route: Option<&'static str>,
    /// Shapes that both sides tokenize identically.
    equal: Vec<&'static str>,
    /// Shapes that the engine tokenizes or counts differently.
    differs: Vec<&'static str>,
    unproven: Vec<&'static str>,
    /// Shapes for which the token counts in responses agreed.
    counted_alike: Vec<&'static str>,
    /// Describes the first difference, or why a shape is unproven.
    detail: Option<String>,
}

#[derive(Serialize, JsonSchema)]
struct PinnedRoute {
    route: &'static str,
    /// Whether requests carry the chosen rank and are assumed to run there; otherwise the engine chooses.
    pinned: bool,
    /// `unverified`, `honoured` or `pin ignored`, by the evidence so far.
    state: &'static str,
    agreed: u64,
    contradicted: u64,
    /// Describes the last contradiction, or else the outcome of the last probe round.
    detail: Option<String>,
}

#[derive(Serialize, JsonSchema)]
struct Rank {
    rank: u16,
    available: bool,
    in_flight_requests: u32,
    /// Prompt tokens, plus response tokens received or expected.
    in_flight_tokens: u64,
    /// Prompt tokens of streams that have sent nothing yet, minus the tokens assumed to be cached.
    pending_tokens: u64,
    /// Whether the rank has answered since it opened; until then its load is assumed to be the mean of the others.
    known: bool,
    recent_tokens: f64,
    /// Price, in the unit of expected local shares.
    price: f64,
}

pub(super) fn collect(control: &Control) -> Backends {
    let snapshot = control.backends.snapshot();
    let backends = snapshot.models.iter().flat_map(|model| describe(model)).collect();
    control.backends.sweep();
    let absent = control.backends.drains.absent(Instant::now()).into_iter();
    let drained_absent = absent.map(|(name, time)| Absent { name, seconds: time.as_secs_f64() }).collect();
    Backends { generation: snapshot.generation, backends, drained_absent }
}

pub(super) async fn drain(
    State(control): State<Arc<Control>>,
    Path(name): Path<String>,
) -> Result<Json<Drained>, RequestError> {
    set_draining(&control, name, true)
}

pub(super) async fn undrain(
    State(control): State<Arc<Control>>,
    Path(name): Path<String>,
) -> Result<Json<Drained>, RequestError> {
    // Probe first: the engine may have restarted in the meantime, with another placement.
    if let Some(backend) = control.backends.backend(&name) {
        crate::backends::health::probe_again(&control.backends, &backend, &control.backends.patient_limits()).await;
    }
    set_draining(&control, name, false)
}

fn set_draining(control: &Control, name: String, draining: bool) -> Result<Json<Drained>, RequestError> {
    if !control.backends.set_draining(&name, draining) {
        return Err(RequestError::UnknownBackend { name });
    }
    tracing::info!(backend = name, draining, "drain requested");
    let snapshot = control.backends.snapshot();
    let in_flight = snapshot.find(&name).map(|at| in_flight(&snapshot.models[at.model], at.member));
    Ok(Json(Drained { in_flight_requests: in_flight.unwrap_or(0), name, draining }))
}

/// Number of requests in flight on a backend, whether the gateway or the engine chose the rank.
fn in_flight(model: &Model, member: usize) -> u64 {
    u64::try_from(model.pool.in_flight_of(member)).unwrap_or(0)
}

fn breaker(backend: &crate::backends::backend::Backend) -> Breaker {
    let breaker = backend.gate.breaker();
    let left = |until: Instant| until.saturating_duration_since(Instant::now()).as_secs_f64();
    Breaker {
        state: breaker.state().name(),
        failures: breaker.failures(),
        errors: breaker.errors(),
        openings: breaker.openings,
        open_seconds: breaker.open_until().map(left),
    }
}

fn describe(model: &Model) -> Vec<Backend> {
    let loads = model.pool.counted();
    let ranks = |member: usize| {
        let slots = model.pool.slots().iter().zip(&loads);
        slots
            .filter(|(slot, _)| slot.backend == member)
            .map(|(slot, load)| Rank {
                rank: slot.rank.get(),
                available: load.available,
                in_flight_requests: load.in_flight_requests,
                in_flight_tokens: load.in_flight_tokens,
                recent_tokens: load.recent_tokens,
                pending_tokens: load.pending_tokens,
                known: load.known,
                price: load.price,
            })
            .collect()
    };
    let describe = |(index, member): (usize, &Member)| {
        let backend = &member.backend;
        let health = backend.health();
        let probe = backend.last_probe();
        let unpinned = member.fit.unpinned.as_ref();
        Backend {
            model: model.name.clone(),
            policy: model.plan.policy.name(),
            name: backend.name.clone(),
            engine: backend.engine.name(),
            url: backend.config.first_url().to_string(),
            urls: backend.config.urls.iter().map(ToString::to_string).collect(),
            version: probe.as_ref().and_then(|probe| probe.version.clone()),
            placement_by: probe.as_ref().map_or("unknown", |probe| {
                let tables = member.tables.as_ref().map(|loaded| loaded.tables.as_ref());
                placement_source(probe, &backend.config, tables)
            }),
            pins: pins(member),
            chats: chats(member),
            by_load: unpinned.map(|why| ByLoad { reason: why.reason(), detail: why.to_string() }),
            healthy: health.is_healthy() && !backend.gate.is_aside(Aside::Silent),
            cause: match health {
                Health::Healthy => backend.gate.is_aside(Aside::Silent).then(|| SILENT.to_owned()),
                Health::Unknown => Some("not probed yet".to_owned()),
                Health::Unhealthy { cause } => Some(cause),
            },
            draining: backend.gate.is_draining(),
            in_flight_requests: in_flight(model, index),
            breaker: breaker(backend),
            ranks: ranks(index),
        }
    };
    model.members.iter().enumerate().map(describe).collect()
}

fn chats(member: &Member) -> Chats {
    let known = Known::of(member);
    let names = |shapes: Shapes| shapes.names().collect();
    Chats {
        state: known.state(),
        route: member.backend.last_probe().and_then(|probe| probe.rendering.as_ref()?.route),
        equal: names(known.equal),
        differs: names(known.differs),
        unproven: names(known.unproven()),
        counted_alike: names(member.backend.counts.agreed()),
        detail: known.detail(member),
    }
}

fn pins(member: &Member) -> Pins {
    let known = member.backend.pins.state();
    let RouteState { watch, detail, .. } = known.summary(|route| member.fit.dialect.reads(route).is_some());
    let state = match &member.fit {
        Fit { unpinned: Some(_), .. } => "not pinned",
        Fit { ranks: 0 | 1, .. } => "one rank",
        fit if fit.dialect == Dialect::by_url(member.backend.engine) => "by url",
        _ if known.refusal.is_some() => "not pinned",
        _ => watch.pins.name(),
    };
    let evidence = watch.evidence.map(Evidence::name);
    let detail = member.fit.unpinned.as_ref().map(ToString::to_string).or(known.refusal.clone()).or(detail);
    let (agreed, contradicted) = (watch.agreed, watch.contradicted);
    Pins { state, agreed, contradicted, evidence, detail, routes: routes(member, &known) }
}

fn routes(member: &Member, known: &PinState) -> Vec<PinnedRoute> {
    let can_carry = |route: &Route| member.fit.ranks > 1 && member.fit.dialect.carrier(*route).is_some();
    let describe = |route: Route| {
        let RouteState { watch, detail, .. } = known.route(route);
        let pinned = member.run(route) == Run::Chosen;
        let (state, agreed, contradicted) = (watch.pins.name(), watch.agreed, watch.contradicted);
        PinnedRoute { route: route.name(), pinned, state, agreed, contradicted, detail }
    };
    Route::ALL.into_iter().filter(can_carry).map(describe).collect()
}
