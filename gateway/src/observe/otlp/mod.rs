//! Traces of requests, sent to an OpenTelemetry collector.
//!
//! | part | what |
//! |---|---|
//! | `context` | W3C `traceparent`: read from clients, written for engines |
//! | `request` | the spans of one request |
//! | `document` | spans as OTLP's JSON |
//! | `export` | the queue, and the task that empties it |
//!
//! OTLP over HTTP is a POST of one document, for which the existing HTTP client suffices. OpenTelemetry's own types
//! (`opentelemetry-proto` 0.31 with serde) would add 15 crates, tonic and prost among them, without saving code: they
//! nest like the document, so filling them takes the 50 lines that fill it. `opentelemetry-otlp` would add 17, with its
//! own threads and batches. An untraced request costs one check of an `Option`. Spans record where a request went and
//! how long each stage took, but nothing of its content.

mod context;
mod document;
mod export;
mod request;

pub(crate) use document::Value;
pub(crate) use export::{Exporter, Tracer};
pub(crate) use request::{RequestTrace, Stage};
