//! Spans as OTLP's JSON (opentelemetry-proto 1.x: ids in hexadecimal, 64-bit numbers as text, enums as numbers).

use std::borrow::Cow;

use serde::ser::{Serialize, SerializeSeq, SerializeStruct, Serializer};

use super::context::Context;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Internal = 1,
    Server = 2,
    Client = 3,
}

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Text(Cow<'static, str>),
    Number(u64),
    Real(f64),
    Truth(bool),
}

/// A stretch of time in a trace.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    pub(super) context: Context,
    parent: Option<u64>,
    name: &'static str,
    kind: Kind,
    began_nanos: u64,
    ended_nanos: u64,
    attributes: Vec<(&'static str, Value)>,
    failed: Option<&'static str>,
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

    pub(super) fn fail(&mut self, cause: &'static str) {
        self.failed = Some(cause);
    }

    pub(super) fn nanos_until(&self, nanos: u64) -> u64 {
        nanos.saturating_sub(self.began_nanos)
    }

    pub(super) fn end(&mut self, nanos: u64) {
        self.ended_nanos = nanos;
    }
}

/// The body posted.
pub(super) fn encode(service: &str, spans: &[Span]) -> Result<Vec<u8>, serde_json::Error> {
    let resource = [
        ("service.name", Value::Text(service.to_owned().into())),
        ("service.version", Value::Text(env!("CARGO_PKG_VERSION").into())),
    ];
    serde_json::to_vec(&Document { resource: &resource, spans })
}

struct Document<'a> {
    resource: &'a [(&'static str, Value)],
    spans: &'a [Span],
}

/// An object with one field, which is a list of one object: OTLP nests by resource and by scope.
macro_rules! nested {
    ($serializer:ident, $($key:literal => $value:expr),+) => {{
        let fields = [$($key),+].len();
        let mut object = $serializer.serialize_struct("", fields)?;
        $(object.serialize_field($key, &$value)?;)+
        object.end()
    }};
}

impl Serialize for Document<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        nested!(serializer, "resourceSpans" => [ResourceSpans(self)])
    }
}

struct ResourceSpans<'a>(&'a Document<'a>);

impl Serialize for ResourceSpans<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        nested!(serializer, "resource" => Resource(self.0.resource), "scopeSpans" => [ScopeSpans(self.0.spans)])
    }
}

struct Resource<'a>(&'a [(&'static str, Value)]);

impl Serialize for Resource<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        nested!(serializer, "attributes" => Attributes(self.0))
    }
}

struct ScopeSpans<'a>(&'a [Span]);

impl Serialize for ScopeSpans<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        nested!(serializer, "scope" => Scope, "spans" => self.0)
    }
}

struct Scope;

impl Serialize for Scope {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        nested!(serializer, "name" => env!("CARGO_PKG_NAME"))
    }
}

struct Attributes<'a>(&'a [(&'static str, Value)]);

impl Serialize for Attributes<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.0.len()))?;
        self.0.iter().try_for_each(|(key, value)| list.serialize_element(&Attribute(key, value)))?;
        list.end()
    }
}

struct Attribute<'a>(&'static str, &'a Value);

impl Serialize for Attribute<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        nested!(serializer, "key" => self.0, "value" => self.1)
    }
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Text(text) => nested!(serializer, "stringValue" => text),
            Self::Number(number) => nested!(serializer, "intValue" => number.to_string()),
            Self::Real(number) => nested!(serializer, "doubleValue" => number),
            Self::Truth(truth) => nested!(serializer, "boolValue" => truth),
        }
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        nested!(serializer,
            "traceId" => format!("{:032x}", self.context.trace),
            "spanId" => format!("{:016x}", self.context.span),
            "parentSpanId" => self.parent.map_or_else(String::new, |parent| format!("{parent:016x}")),
            "name" => self.name,
            "kind" => self.kind as u8,
            "startTimeUnixNano" => self.began_nanos.to_string(),
            "endTimeUnixNano" => self.ended_nanos.to_string(),
            "attributes" => Attributes(&self.attributes),
            "status" => Status(self.failed)
        )
    }
}

struct Status(Option<&'static str>);

impl Serialize for Status {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            None => serializer.serialize_struct("", 0)?.end(),
            // STATUS_CODE_ERROR
            Some(cause) => nested!(serializer, "code" => 2, "message" => cause),
        }
    }
}
