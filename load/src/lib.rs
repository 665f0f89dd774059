//! A load generator for servers that generate text: closed and open loop, latencies without coordinated omission, and a
//! report.
//!
//! | module | what |
//! |---|---|
//! | `options` | the settings of a run, checked |
//! | `schedule`, `arrivals` | when requests are due |
//! | `window` | which requests are measured, and the period for rates |
//! | `api`, `jobs` | the requests sent |
//! | `events`, `answer` | parsing of answers |
//! | `failure` | ways in which a request can fail |
//! | `latency`, `spread`, `stats` | histograms and counts, bounded whatever the run's length |
//! | `report`, `compare`, `text` | the report |
//! | `edge` | everything else: sockets, threads, clocks |
//!
//! An answer counts as complete only if it has all of `Content-Length`, or the last chunk; `[DONE]` at the end of a
//! stream; and no error.

mod answer;
mod api;
mod arrivals;
mod compare;
mod edge;
mod error;
mod events;
mod failure;
mod jobs;
mod latency;
mod options;
mod report;
mod schedule;
mod spread;
mod stats;
mod text;
mod window;

pub use api::Api;
pub use arrivals::read_arrivals;
pub use compare::{Comparison, Ratio, Round};
pub use edge::{Snapshot, compare, only_model, run};
pub use error::LoadError;
pub use failure::{Break, ConnectFailure, Failure, Phase};
pub use latency::LatencySummary;
pub use options::{Limit, LoadOptions, MAX_CONCURRENCY, Pace, Slo, bearer, parse_header};
pub use report::{ErrorCount, Generator, Goodput, Report, RequestCounts, TokenReport};
pub use spread::SpreadSummary;
