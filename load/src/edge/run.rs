//! Complete runs, against one server or alternately against two.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use semmoe_engines::http::BaseUrl;
use semmoe_engines::tls::ClientTls;
use tokio_util::sync::CancellationToken;

use super::shared::Shared;
use super::target::{Target, only_model};
use super::threads::Workers;
use crate::arrivals::read_arrivals;
use crate::compare::{Comparison, Round};
use crate::jobs::Jobs;
use crate::latency::LatencySummary;
use crate::report::{Facts, Generator, Report};
use crate::schedule::Schedule;
use crate::{Limit, LoadError, LoadOptions, Pace};

/// Receives the progress of a run.
type View<'a> = &'a (dyn Fn(&Snapshot) + Sync);

/// Progress of a run.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The current block, counted from 1, and the number of blocks, which is 1 except in comparisons.
    pub block: (usize, usize),
    /// Time since measurement began; `None` during the warm-up.
    pub elapsed: Option<Duration>,
    /// Number of complete responses.
    pub ok: u64,
    /// Number of failed requests.
    pub failed: u64,
    /// Number of requests in flight.
    pub in_flight: usize,
    /// Output tokens of complete responses, as reported or counted.
    pub output_tokens: u64,
    /// Latency to the first content.
    pub ttft: Option<LatencySummary>,
    /// Time to the end.
    pub e2e: Option<LatencySummary>,
}

/// Runs the load, measures and reports.
///
/// `view` is called about once a second. Once `stop` resolves, no more requests are sent, requests in flight get a
/// short grace period, and the report is marked as stopped. Must be called within a Tokio runtime; separate threads
/// send the load.
///
/// # Errors
/// A `LoadError` before the first request; failed requests are counted in the report.
pub async fn run(options: LoadOptions, view: View<'_>, stop: impl Future<Output = ()>) -> Result<Report, LoadError> {
    options.check()?;
    tokio::pin!(stop);
    let prepared = tokio::select! {
        // `stop` is polled before anything is sent, because it may have to start listening.
        biased;
        () = &mut stop => return Err(LoadError::Cancelled),
        prepared = Prepared::new(options, None) => prepared?,
    };
    prepared.block(Place { block: (1, 1), first_prompt: 0 }, view, stop).await
}

/// Runs the load against the server of `options` and against `second` in `rounds` rounds, each with one block per
/// server in alternating order. The limit applies to each server and is divided among the rounds; each block begins
/// with the warm-up. Both blocks of a round send the same prompts and, in an open loop, follow the same schedule.
///
/// # Errors
/// See [`run`].
pub async fn compare(
    mut options: LoadOptions,
    second: BaseUrl,
    rounds: usize,
    view: View<'_>,
    stop: impl Future<Output = ()>,
) -> Result<Comparison, LoadError> {
    options.limit = block_limit(&options, rounds)?;
    options.check()?;
    let token = CancellationToken::new();
    let work = async {
        let first = Prepared::new(options.clone(), None).await?;
        let same_model = options.model.is_some() || !options.api.names_model();
        let jobs = same_model.then(|| Arc::clone(&first.jobs));
        let second = Prepared::new(LoadOptions { url: second, ..options }, jobs).await?;
        all_rounds(&[first, second], rounds, view, &token).await
    };
    let watch = async {
        stop.await;
        token.cancel();
        std::future::pending().await
    };
    tokio::select! {
        biased;
        never = watch => never,
        comparison = work => comparison,
    }
}

fn block_limit(options: &LoadOptions, rounds: usize) -> Result<Limit, LoadError> {
    let bad = |option, found: &str, expected| Err(LoadError::option(option, found, expected));
    let parts = u32::try_from(rounds).unwrap_or(0);
    match (options.limit, &options.pace) {
        _ if !(2..=10_000).contains(&parts) => bad("rounds", &rounds.to_string(), "2 to 10000"),
        (Limit::Arrivals, _) | (_, Pace::Recorded { .. }) => {
            bad("the pace of a comparison", "an arrival file", "a closed loop or a rate")
        }
        (Limit::Requests(all), _) => Ok(Limit::Requests(all.div_ceil(u64::from(parts)))),
        (Limit::Duration(all), _) => Ok(Limit::Duration(all / parts)),
    }
}

async fn all_rounds(
    servers: &[Prepared; 2],
    rounds: usize,
    view: View<'_>,
    token: &CancellationToken,
) -> Result<Comparison, LoadError> {
    let (mut done, mut first_prompt) = (Vec::new(), 0u64);
    for round in 0..rounds {
        let place = |at| Place { block: (2 * round + at + 1, 2 * rounds), first_prompt };
        // The first block of a round may find the machine or a cache in a different state, so both servers go first
        // equally often.
        let leader = round % 2;
        let earlier = servers[leader].block(place(0), view, token.cancelled()).await?;
        if token.is_cancelled() {
            break;
        }
        let later = servers[1 - leader].block(place(1), view, token.cancelled()).await?;
        if token.is_cancelled() {
            break;
        }
        let sent = earlier.requests.sent.max(later.requests.sent);
        first_prompt = first_prompt.saturating_add(sent).saturating_add(earlier.requests.warmup);
        let (first, second) = if leader == 0 { (earlier, later) } else { (later, earlier) };
        done.push(Round { first, second });
    }
    Ok(Comparison::new(done, token.is_cancelled()))
}

/// A block's index in the run, and the index of its first prompt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) block: (usize, usize),
    pub(crate) first_prompt: u64,
}

/// A resolved server, and the requests for it.
struct Prepared {
    options: Arc<LoadOptions>,
    target: Arc<Target>,
    jobs: Arc<Jobs>,
    schedule: Option<Schedule>,
}

impl Prepared {
    /// Uses `jobs` if given, otherwise creates its own.
    async fn new(mut options: LoadOptions, jobs: Option<Arc<Jobs>>) -> Result<Self, LoadError> {
        let schedule = match &options.pace {
            Pace::Closed { .. } => None,
            Pace::Poisson { per_second, seed } => Some(Schedule::poisson(*per_second, *seed)),
            Pace::Recorded { arrivals, speed } => Some(Schedule::recorded(read_arrivals(arrivals)?, *speed)),
        };
        // Reads a few files (blocking), before anything is sent.
        let tls =
            options.url.is_secure().then(|| ClientTls::load(options.tls.clone(), false)).transpose()?.map(Arc::new);
        let target = Arc::new(Target::find(&options, tls.clone()).await?);
        if options.model.is_none() && options.api.names_model() {
            options.model = Some(only_model(&options.url, &options.headers, tls).await?);
        }
        let jobs = match jobs {
            Some(jobs) => jobs,
            None => Arc::new(Jobs::read(&options)?),
        };
        Ok(Self { options: Arc::new(options), target, jobs, schedule })
    }

    /// Sends requests until the limit is reached.
    async fn block(&self, place: Place, view: View<'_>, stop: impl Future<Output = ()>) -> Result<Report, LoadError> {
        let (target, jobs, options) = (Arc::clone(&self.target), Arc::clone(&self.jobs), Arc::clone(&self.options));
        let shared = Arc::new(Shared::new(target, jobs, options, place));
        let (begin, cpu) = (Instant::now(), cpu_time());
        let workers = Workers::start(&shared, self.schedule.clone())?;
        let stopped = workers.watch(view, stop).await;
        let threads = workers.stats.len();
        let stats = workers.end();
        let facts = Facts {
            seconds: shared.window.length(stopped).as_secs_f64(),
            sent: shared.sent.load(Ordering::Relaxed),
            stopped: stopped.is_some(),
            first_prompt: place.first_prompt,
            wall_seconds: begin.elapsed().as_secs_f64(),
            generator: Generator {
                threads,
                cpu_seconds: cpu_time().saturating_sub(cpu).as_secs_f64(),
                cpu_us_per_request: 0.0,
                connections: shared.connections.opened.load(Ordering::Relaxed),
                most_in_flight: shared.most_in_flight.load(Ordering::Relaxed),
                held_back: shared.held_back.load(Ordering::Relaxed),
                stray_bytes: shared.connections.stray.load(Ordering::Relaxed),
                prompts: self.jobs.bodies.len(),
                prompts_left_out: self.jobs.left_out,
            },
        };
        Ok(Report::new(&self.options, &stats, &facts))
    }
}

/// CPU time of this process.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}
