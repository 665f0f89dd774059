//! `/healthz`, `/readyz`, `/metrics`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode, header};

use super::guard::text;
use crate::backend::Health;
use crate::metrics::TextFormat;
use crate::state::Core;

pub(super) async fn alive() -> &'static str {
    "ok\n"
}

pub(super) async fn ready(State(core): State<Arc<Core>>) -> (StatusCode, String) {
    if core.is_draining() {
        return (StatusCode::SERVICE_UNAVAILABLE, "shutting down\n".to_owned());
    }
    let (mut causes, mut notes) = (String::new(), String::new());
    for model in &core.snapshot().models {
        if let Some(error) = model.text.as_ref().and_then(|text| text.template_error.as_ref()) {
            notes.push_str(&format!("model '{}': its chat template cannot be used: {error}\n", model.name));
        }
        if model.members.iter().any(|member| member.backend.takes_requests()) {
            continue;
        }
        if model.members.is_empty() {
            causes.push_str(&format!("model '{}': no backend was discovered yet\n", model.name));
        }
        for member in &model.members {
            let cause = match member.backend.health() {
                Health::Unhealthy { cause } => cause,
                Health::Healthy => "is drained".to_owned(),
                Health::Unknown => "not probed yet".to_owned(),
            };
            causes.push_str(&format!("model '{}', backend '{}': {cause}\n", model.name, member.backend.name));
        }
    }
    if causes.is_empty() {
        (StatusCode::OK, format!("ready\n{notes}"))
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, causes)
    }
}

pub(super) async fn metrics(State(core): State<Arc<Core>>, headers: HeaderMap) -> Response {
    core.sweep();
    core.metrics.memory.bodies(core.body_memory.held_bytes());
    for model in &core.snapshot().models {
        for member in &model.members {
            core.metrics.requests.answers.streams(&member.backend.name, member.backend.flow.peek());
        }
        if let Some(text) = &model.text {
            core.metrics.text(&model.name, &text.tokenizer.segment_cache(), text.template_error.is_some());
        }
        let policy = &model.plan.policy;
        if let Some((report, watched)) = model.pool.report().zip(policy.watched()) {
            core.metrics.shadow.set(&model.name, policy.acting_name(), watched.name(), &report);
        }
    }
    let format = TextFormat::accepted(text(&headers, &header::ACCEPT));
    let head = [(header::CONTENT_TYPE, format.content_type()), (header::VARY, "Accept")];
    (head, core.metrics.encode(format)).into_response()
}
