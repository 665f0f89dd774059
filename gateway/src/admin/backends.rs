//! `GET /admin/backends`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;

use crate::backend::Health;
use crate::compat::placement_source;
use crate::snapshot::{Member, Model};
use crate::state::Core;

#[derive(Serialize)]
pub(super) struct Backends {
    generation: u64,
    backends: Vec<Backend>,
}

#[derive(Serialize)]
struct Backend {
    model: String,
    policy: &'static str,
    name: String,
    engine: &'static str,
    /// The first one.
    url: String,
    /// All of them, where each rank has its own.
    urls: Vec<String>,
    /// As the engine tells it.
    version: Option<String>,
    /// Who says which placement runs: `engine`, `configuration` or `tables`, which are believed.
    placement_by: &'static str,
    pins: Pins,
    healthy: bool,
    /// Why it gets no requests.
    cause: Option<String>,
    ranks: Vec<Rank>,
}

#[derive(Serialize)]
struct Pins {
    /// `unverified`, `honoured`, `pin ignored` (requests are routed by load), `by url`, or `one rank`.
    state: &'static str,
    agreed: u64,
    contradicted: u64,
}

#[derive(Serialize)]
struct Rank {
    rank: u16,
    available: bool,
    in_flight_requests: u32,
    in_flight_tokens: u64,
    /// Prompt tokens of streaming requests that sent nothing yet, less what is believed to be cached.
    pending_tokens: u64,
    /// Whether the rank answered since it was opened; until then it counts as loaded as the others.
    known: bool,
    recent_tokens: f64,
    /// In units of share.
    price: f64,
}

pub(super) async fn list(State(core): State<Arc<Core>>) -> Json<Backends> {
    let snapshot = core.snapshot();
    let backends = snapshot.models.iter().flat_map(|model| describe(model)).collect();
    Json(Backends { generation: snapshot.generation, backends })
}

fn describe(model: &Model) -> Vec<Backend> {
    let loads = model.pool.look();
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
        Backend {
            model: model.name.clone(),
            policy: model.plan.policy().name(),
            name: backend.name.clone(),
            engine: backend.engine.name(),
            url: backend.urls.first().map(ToString::to_string).unwrap_or_default(),
            urls: backend.urls.iter().map(ToString::to_string).collect(),
            version: probe.as_ref().and_then(|probe| probe.version.clone()),
            placement_by: probe.as_ref().map_or("unknown", |probe| {
                let tables = member.tables.as_ref().map(|loaded| loaded.tables.as_ref());
                placement_source(probe, backend.configured_placement.as_deref(), tables)
            }),
            pins: pins(member),
            healthy: health.is_healthy(),
            cause: match health {
                Health::Healthy => None,
                Health::Unknown => Some("not probed yet".to_owned()),
                Health::Unhealthy { cause } => Some(cause),
            },
            ranks: ranks(index),
        }
    };
    model.members.iter().enumerate().map(describe).collect()
}

fn pins(member: &Member) -> Pins {
    let watch = member.backend.pins();
    let state = match member {
        Member { ranks: 0 | 1, .. } => "one rank",
        _ if member.backend.urls.len() > 1 => "by url",
        _ => watch.pins.name(),
    };
    Pins { state, agreed: watch.agreed, contradicted: watch.contradicted }
}
