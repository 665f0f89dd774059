//! `GET /v1/models` and `/v1/models/{id}`: the models that can be served now.

use std::sync::Arc;

use axum::Json;
use serde_json::{Value, json};

use super::DataPlane;
use crate::backends::{Model, RequestError, Snapshot};
use crate::data::trust::Caller;

/// The route of the model list.
pub(super) const LIST: &str = "/v1/models";
/// Methods allowed for the list and its entries.
pub(super) const METHODS: &str = "GET,HEAD";

/// Returns the model id in a path; `None` for the list and other routes.
pub(super) fn entry_of(path: &str) -> Option<&str> {
    path.strip_prefix(LIST)?.strip_prefix('/').filter(|id| !id.is_empty())
}

/// Lists all names, aliases and configured adapters of the models that the caller may use and that have a healthy
/// backend.
pub(super) fn list(plane: &DataPlane, caller: &Caller) -> Json<Value> {
    Json(json!({ "object": "list", "data": served(&plane.backends.snapshot(), plane, caller).collect::<Vec<Value>>() }))
}

/// Returns the entry with this id, as escaped in a path.
///
/// # Errors
/// The list does not contain the id.
pub(super) fn entry(plane: &DataPlane, caller: &Caller, id: &str) -> Result<Json<Value>, RequestError> {
    let (snapshot, id) = (plane.backends.snapshot(), decoded(id));
    match served(&snapshot, plane, caller).find(|entry| entry["id"].as_str().map(str::as_bytes) == Some(&id)) {
        Some(entry) => Ok(Json(entry)),
        None => {
            let names: Vec<&str> = able(&snapshot, caller).map(|model| model.name.as_str()).collect();
            Err(RequestError::unknown_model(&String::from_utf8_lossy(&id), names.join(", ")))
        }
    }
}

fn able<'a>(snapshot: &'a Snapshot, caller: &Caller) -> impl Iterator<Item = &'a Model> {
    let models = snapshot.models.iter().map(Arc::as_ref).filter(|model| caller.may_use(&model.name));
    models.filter(|model| model.members.iter().any(|member| member.backend.takes_requests()))
}

fn served(snapshot: &Snapshot, plane: &DataPlane, caller: &Caller) -> impl Iterator<Item = Value> {
    let created = plane.started_unix_seconds;
    able(snapshot, caller).flat_map(move |model| entries(model, created))
}

/// Unescapes an id, in which `%2F` and a plain slash both mean a slash. Malformed escapes stay unchanged.
fn decoded(id: &str) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::with_capacity(id.len()), id.as_bytes());
    while let [first, after @ ..] = rest {
        let digit = |at: usize| after.get(at).and_then(|digit| char::from(*digit).to_digit(16));
        match (first, digit(0), digit(1)) {
            (b'%', Some(high), Some(low)) => {
                bytes.push((high * 16 + low) as u8);
                rest = &after[2..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    bytes
}

fn entries(model: &Model, created: u64) -> impl Iterator<Item = Value> {
    // A request within the smallest context length fits every backend.
    let longest = model.members.iter().filter_map(|member| member.backend.max_model_len()).min();
    let entry = move |id: &str| {
        let mut entry = json!({ "id": id, "object": "model", "created": created, "owned_by": "semmoe" });
        if let Some(tokens) = longest {
            entry["max_model_len"] = tokens.into();
        }
        entry
    };
    let adapter = move |adapter: &String| {
        let mut entry = entry(&format!("{}:{adapter}", model.name));
        entry["parent"] = Value::from(model.name.as_str());
        entry
    };
    let names = model.names().map(move |name| entry(name));
    names.chain(model.other_names.adapters.iter().flatten().map(adapter))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_an_entry() {
        for (path, expected) in [
            ("/v1/models/a", Some("a")),
            ("/v1/models/org/a:b", Some("org/a:b")),
            ("/v1/models", None),
            ("/v1/models/", None),
            ("/v1/modelsx", None),
            ("/v1/model/a", None),
        ] {
            assert_eq!(entry_of(path), expected, "{path}");
        }
    }

    #[test]
    fn escapes_are_read_and_what_is_none_stays() {
        for (id, expected) in
            [("org%2Fa%3ab", "org/a:b"), ("%41", "A"), ("100%", "100%"), ("%4", "%4"), ("%zz%+1%", "%zz%+1%"), ("", "")]
        {
            assert_eq!(decoded(id), expected.as_bytes(), "{id}");
        }
        assert_eq!(decoded("%ff%00"), [0xff, 0]);
    }
}
