//! `GET /admin/openapi.json`: the table of routes as an OpenAPI 3.1 document.
//!
//! Schemas are derived from the handlers' own types, so they cannot diverge from them.

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::routes::{ADMIN, Gives, Route, STATUS, Takes};

/// A document that another specification defines.
#[derive(Serialize, JsonSchema)]
pub(super) struct AnyObject(Map<String, Value>);

/// The body of every error, in the form that OpenAI's clients expect. `crate::error` writes it; this type provides its
/// schema.
#[derive(Serialize, JsonSchema)]
struct Failure {
    error: FailureDetail,
}

#[derive(Serialize, JsonSchema)]
struct FailureDetail {
    /// One sentence.
    message: String,
    /// `invalid_request_error`, `server_error` or `upstream_error`.
    r#type: String,
    /// Always null.
    param: Option<String>,
    /// A stable, machine-readable code.
    code: String,
}

fn settings() -> SchemaSettings {
    let mut settings = SchemaSettings::draft2020_12();
    settings.definitions_path = "/components/schemas".into();
    settings.meta_schema = None;
    settings
}

pub(super) fn document() -> Value {
    let mut answers = settings().for_serialize().into_generator();
    let failure = answers.subschema_for::<Failure>();
    let mut paths = Map::new();
    for route in STATUS.iter().chain(ADMIN) {
        let operations = paths.entry(route.path).or_insert_with(|| json!({}));
        operations[route.method.to_lowercase()] = operation(route, &mut answers);
    }
    json!({
        "openapi": "3.1.0",
        "info": { "title": "semmoe gateway, admin plane", "version": env!("CARGO_PKG_VERSION") },
        "paths": paths,
        "security": [{}, { "token": [] }],
        "components": {
            "schemas": answers.take_definitions(true),
            "securitySchemes": { "token": { "type": "http", "scheme": "bearer" } },
            "responses": {
                "Failure": { "description": "one sentence with the reason", "content": content("application/json", failure) },
            },
        },
    })
}

fn operation(route: &Route, answers: &mut SchemaGenerator) -> Value {
    let good = match route.gives {
        Gives::Json(schema) => content("application/json", schema(answers)),
        Gives::Text => content("text/plain", json!({ "type": "string" })),
        Gives::Page => content("text/html", json!({ "type": "string" })),
    };
    // A text route also reports errors as text, because its clients do not parse JSON.
    let bad = match route.gives {
        Gives::Json(_) | Gives::Page => json!({ "$ref": "#/components/responses/Failure" }),
        Gives::Text => json!({ "description": "the causes", "content": good.clone() }),
    };
    let mut operation = json!({
        "summary": route.what,
        "responses": { "200": { "description": "done", "content": good }, "default": bad },
    });
    let mut parameters: Vec<Value> = in_path(route.path).map(|name| parameter(name, "path", true)).collect();
    // Bodies are inlined, because a type's required fields differ between reading and writing.
    let mut bodies = settings().for_deserialize().with(|settings| settings.inline_subschemas = true).into_generator();
    let body = match route.takes {
        Takes::Nothing => None,
        Takes::Json(schema) => Some(content("application/json", schema(&mut bodies))),
        Takes::JsonOrUpload(schema) => {
            parameters.push(parameter("backend", "query", false));
            let mut body = content("application/json", schema(&mut bodies));
            body["application/octet-stream"] = json!({});
            Some(body)
        }
    };
    if let Some(content) = body {
        operation["requestBody"] = json!({ "required": true, "content": content });
    }
    if !parameters.is_empty() {
        operation["parameters"] = parameters.into();
    }
    operation
}

fn content(kind: &str, schema: impl Serialize) -> Value {
    json!({ kind: { "schema": schema } })
}

fn parameter(name: &str, place: &str, required: bool) -> Value {
    json!({ "name": name, "in": place, "required": required, "schema": { "type": "string" } })
}

/// Lists the parameter names in a path, which are in braces.
fn in_path(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
}
