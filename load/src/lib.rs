//! A load generator for text generation servers, with closed and open loops, latencies without coordinated omission,
//! and a report.
//!
//! | module | what |
//! |---|---|
//! | `options` | the settings of a run, validated |
//! | `schedule`, `arrivals` | when requests are due |
//! | `window` | which requests are measured, and the period that rates cover |
//! | `api`, `jobs` | the requests sent |
//! | `events`, `answer` | parsing of responses |
//! | `failure` | ways in which a request can fail |
//! | `latency`, `spread`, `stats` | histograms and counts, in bounded memory for any length of run |
//! | `report`, `compare`, `text` | the report |
//! | `edge` | everything else: sockets, threads, clocks |
//!
//! A response counts as complete only if it has all `Content-Length` bytes or the last chunk, ends with `[DONE]` if it
//! is a stream, and contains no error.

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
