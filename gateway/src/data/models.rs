//! `GET /v1/models`: what can be served now.

use axum::Json;
use serde_json::{Value, json};

use crate::snapshot::Model;
use crate::state::Core;
use crate::trust::Caller;

/// Every name, alias and configured adapter of the models that the caller may use and that have a healthy backend.
pub(crate) fn list(core: &Core, caller: &Caller) -> Json<Value> {
    let snapshot = core.snapshot();
    let served = snapshot
        .models
        .iter()
        .filter(|model| caller.may_use(&model.name))
        .filter(|model| model.members.iter().any(|member| member.backend.takes_requests()))
        .flat_map(|model| entries(model, core.started_unix_seconds));
    Json(json!({ "object": "list", "data": served.collect::<Vec<Value>>() }))
}

fn entries(model: &Model, created: u64) -> impl Iterator<Item = Value> {
    let entry = move |id: &str| json!({ "id": id, "object": "model", "created": created, "owned_by": "semmoe" });
    let adapter = move |adapter: &String| {
        let mut entry = entry(&format!("{}:{adapter}", model.name));
        entry["parent"] = Value::from(model.name.as_str());
        entry
    };
    let names = std::iter::once(&model.name).chain(&model.aliases).map(move |name| entry(name));
    names.chain(model.adapters.iter().flatten().map(adapter))
}
