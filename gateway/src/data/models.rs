//! `GET /v1/models`: what can be served now.

use axum::Json;
use serde_json::{Value, json};

use crate::state::Core;
use crate::trust::Caller;

/// Every name and alias of the models that the caller may use and that have a healthy backend.
pub(crate) fn list(core: &Core, caller: &Caller) -> Json<Value> {
    let snapshot = core.snapshot();
    let served = snapshot
        .models
        .iter()
        .filter(|model| caller.may_use(&model.name))
        .filter(|model| model.members.iter().any(|member| member.backend.takes_requests()))
        .flat_map(|model| std::iter::once(&model.name).chain(&model.aliases));
    let data: Vec<Value> = served
        .map(
            |name| json!({ "id": name, "object": "model", "created": core.started_unix_seconds, "owned_by": "semmoe" }),
        )
        .collect();
    Json(json!({ "object": "list", "data": data }))
}
