//! Encodes spans as OTLP JSON (opentelemetry-proto 1.x: ids in hexadecimal, 64-bit numbers as text, enums as numbers).

use std::borrow::Cow;

use serde::Serialize;
use serde_json::{Value as Json, json};

use super::context::Context;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Internal = 1,
    Server = 2,
    Client = 3,
}

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) enum Value {
    #[serde(rename = "stringValue")]
    Text(Cow<'static, str>),
    #[serde(rename = "intValue", serialize_with = "as_text")]
    Number(u64),
    #[serde(rename = "doubleValue")]
    Real(f64),
    #[serde(rename = "boolValue")]
    Truth(bool),
}

fn as_text<S: serde::Serializer>(number: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(number)
}

/// A span of a trace.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    pub(super) context: Context,
    parent: Option<u64>,
    name: &'static str,
    kind: Kind,
    pub(super) began_nanos: u64,
    pub(super) ended_nanos: u64,
    attributes: Vec<(&'static str, Value)>,
    pub(super) failed: Option<&'static str>,
}

impl Span {
    pub(super) fn new(name: &'static str, kind: Kind, context: Context, parent: Option<u64>, began_nanos: u64) -> Self {
        let (attributes, failed) = (Vec::new(), None);
        Self { context, parent, name, kind, began_nanos, ended_nanos: began_nanos, attributes, failed }
    }

    pub(super) fn set(&mut self, key: &'static str, value: Value) {
        match self.attributes.iter_mut().find(|(known, _)| *known == key) {
            Some((_, known)) => *known = value,
            None => self.attributes.push((key, value)),
        }
    }

    fn json(&self) -> Json {
        let status = match self.failed {
            None => json!({}),
            // STATUS_CODE_ERROR
            Some(cause) => json!({ "code": 2, "message": cause }),
        };
        json!({
            "traceId": format!("{:032x}", self.context.trace),
            "spanId": format!("{:016x}", self.context.span),
            "parentSpanId": self.parent.map_or_else(String::new, |parent| format!("{parent:016x}")),
            "name": self.name,
            "kind": self.kind as u8,
            "startTimeUnixNano": self.began_nanos.to_string(),
            "endTimeUnixNano": self.ended_nanos.to_string(),
            "attributes": attributes(&self.attributes),
            "status": status,
        })
    }
}

/// Encodes the request body: OTLP nests spans by resource and by scope.
pub(super) fn encode(service: &str, spans: &[Span]) -> Vec<u8> {
    let resource = [
        ("service.name", Value::Text(service.to_owned().into())),
        ("service.version", Value::Text(env!("CARGO_PKG_VERSION").into())),
    ];
    let spans: Vec<Json> = spans.iter().map(Span::json).collect();
    let document = json!({ "resourceSpans": [{
        "resource": { "attributes": attributes(&resource) },
        "scopeSpans": [{ "scope": { "name": env!("CARGO_PKG_NAME") }, "spans": spans }],
    }] });
    document.to_string().into_bytes()
}

fn attributes(all: &[(&'static str, Value)]) -> Json {
    all.iter().map(|(key, value)| json!({ "key": key, "value": value })).collect()
}
