//! Request traces, sent to an OpenTelemetry collector.
//!
//! | part | purpose |
//! |---|---|
//! | `context` | W3C `traceparent`: read from clients, written for engines |
//! | `request` | the spans of one request |
//! | `document` | spans as OTLP JSON |
//! | `export` | the queue, and the task that empties it |
//!
//! OTLP over HTTP is a POST of one document, for which the existing HTTP client suffices. OpenTelemetry's own types
//! (`opentelemetry-proto` 0.31 with serde) would add 15 crates, tonic and prost among them, without saving code: they
//! have the document's structure, so filling them takes the same 50 lines. `opentelemetry-otlp` would add 17, with its
//! own threads and batches. An untraced request costs one check of an `Option`. Spans record a request's path and the
//! duration of each stage, but none of its content.

mod context;
mod document;
mod export;
mod request;

pub(crate) use document::Value;
pub(crate) use export::{Exporter, Tracer};
pub(crate) use request::{RequestTrace, Stage};
