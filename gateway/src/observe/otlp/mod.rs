//! Traces of requests, sent to an OpenTelemetry collector.
//!
//! | part | what |
//! |---|---|
//! | `context` | W3C `traceparent`: read from clients, written for engines |
//! | `request` | the spans of one request |
//! | `document` | spans as OTLP's JSON |
//! | `export` | the queue, and the task that empties it |
//!
//! OTLP over HTTP is one POST of one document, through the HTTP client that is here anyway. OpenTelemetry's own types
//! (`opentelemetry-proto` 0.31 with serde) would add 15 crates, tonic and prost among them, and save no line: they are
//! nested as the document is, so the 50 lines that fill it would fill them. `opentelemetry-otlp` would add 17, with
//! threads and batches of its own. A request that is not traced costs one look at an `Option`. Spans carry where a
//! request went and how long each stage took; nothing of what it says.

mod context;
mod document;
mod export;
mod request;

pub(crate) use document::Value;
pub(crate) use export::{Exporter, Tracer};
pub(crate) use request::{RequestTrace, Stage};
