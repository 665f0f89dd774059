//! Observations: metrics, traces, sampled requests. This module calls none of the crate's other layers.
//!
//! | module | purpose |
//! |---|---|
//! | `metrics` | counters, gauges and histograms by subject; text formats |
//! | `otlp` | request spans for an OpenTelemetry collector |
//! | `live` | routed experts of sampled requests; drift; rolling profiles |

pub(crate) mod live;
pub(crate) mod metrics;
pub(crate) mod otlp;

pub(crate) use live::{Edit, Figures, Live, Sample, Seen, unix_seconds};
pub(crate) use metrics::{
    CLIENT_CLOSED, Done, Generated, MemoryMetrics, Metrics, NONE, OutputTokens, Place, SwitchMetrics, TextFormat, Waits,
};
pub(crate) use otlp::{Exporter, RequestTrace, Stage, Tracer};
