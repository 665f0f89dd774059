//! `GET /admin/backends`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;

use crate::backend::Health;
use crate::snapshot::Model;
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
    url: String,
    healthy: bool,
    /// Why it gets no requests.
    cause: Option<String>,
    ranks: Vec<Rank>,
}

#[derive(Serialize)]
struct Rank {
    rank: u16,
    available: bool,
    in_flight_requests: u32,
    in_flight_tokens: u64,
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
    let (loads, prices) = model.pool.look();
    let ranks = |member: usize| {
        let slots = model.pool.slots().iter().zip(loads.iter().zip(&prices));
        slots
            .filter(|(slot, _)| slot.backend == member)
            .map(|(slot, (load, price))| Rank {
                rank: slot.rank.get(),
                available: load.available,
                in_flight_requests: load.in_flight_requests,
                in_flight_tokens: load.in_flight_tokens,
                recent_tokens: load.recent_tokens,
                price: *price,
            })
            .collect()
    };
    let describe = |(index, member): (usize, &crate::snapshot::Member)| {
        let backend = &member.backend;
        let health = backend.health();
        Backend {
            model: model.name.clone(),
            policy: model.policy.name(),
            name: backend.name.clone(),
            engine: backend.engine.name(),
            url: backend.url.to_string(),
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
