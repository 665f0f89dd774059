//! Observations: metrics, traces, sampled requests. This module calls no other of the crate's layers.
//!
//! | module | what |
//! |---|---|
//! | `metrics` | counters, gauges and histograms by subject; text formats |
//! | `otlp` | spans of requests for an OpenTelemetry collector |
//! | `live` | a share of the requests asked which experts they took; drift; rolling profiles |

pub(crate) mod live;
pub(crate) mod metrics;
pub(crate) mod otlp;

pub(crate) use live::{Edit, Figures, Live, Sample, Seen, unix_seconds};
pub(crate) use metrics::{
    CLIENT_CLOSED, Done, Generated, MemoryMetrics, Metrics, NONE, OutputTokens, Place, SwitchMetrics, TextFormat, Waits,
};
pub(crate) use otlp::{Exporter, RequestTrace, Stage, Tracer};
