//! A whole run: threads, view, end.

use std::future::Future;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};

use super::pacer::{Due, pace};
use super::shared::Shared;
use super::target::{Target, only_model};
use super::worker::{Part, Worker};
use crate::api::BodyForm;
use crate::arrivals::read_arrivals;
use crate::jobs::Jobs;
use crate::latency::LatencySummary;
use crate::report::{Facts, Report};
use crate::schedule::Schedule;
use crate::stats::Stats;
use crate::{LoadError, LoadOptions, Pace};

/// Requests that a worker may be handed before it takes them.
const QUEUE: usize = 256;
/// Between two looks of the caller.
const VIEW_INTERVAL: Duration = Duration::from_secs(1);
/// Files that are none of our connections.
const OTHER_FILES: u64 = 64;

/// How far a run is.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Since the measured time began; `None` in the warm-up.
    pub elapsed: Option<Duration>,
    /// Complete answers.
    pub ok: u64,
    /// Failed requests.
    pub failed: u64,
    /// Requests in flight.
    pub in_flight: usize,
    /// Output tokens of complete answers, told or counted.
    pub output_tokens: u64,
    /// To the first content.
    pub ttft: Option<LatencySummary>,
    /// To the end.
    pub e2e: Option<LatencySummary>,
}

/// Sends, measures and reports.
///
/// `view` is called about once a second. When `stop` resolves nothing more is sent, what is in flight is waited for a little,
/// and the report says so. Must run in a Tokio runtime; the load is sent from threads of its own.
pub async fn run(
    mut options: LoadOptions,
    view: &(dyn Fn(&Snapshot) + Sync),
    stop: impl Future<Output = ()>,
) -> Result<Report, LoadError> {
    options.check()?;
    let schedule = schedule(&options)?;
    tokio::pin!(stop);
    let ready = async {
        let target = Target::find(&options).await?;
        if options.model.is_none() && options.api.names_model() {
            options.model = Some(only_model(&options.url, &options.headers).await?);
        }
        Ok::<_, LoadError>(target)
    };
    let target = tokio::select! {
        target = ready => target?,
        () = &mut stop => return Err(LoadError::Cancelled),
    };
    let form = BodyForm {
        api: options.api,
        model: options.model.as_deref(),
        max_tokens: options.max_tokens,
        stream: options.stream,
        extra: &options.extra,
    };
    let jobs = Jobs::read(&options.prompts, &form)?;
    let shared = Arc::new(Shared::new(target, jobs, &options));
    let cpu = cpu_time();
    let workers = Workers::start(&shared, &options, schedule)?;
    let stopped = workers.watch(view, stop).await;
    let threads = workers.stats.len();
    let stats = workers.end();
    let facts = Facts {
        seconds: shared.window_length(stopped).as_secs_f64(),
        sent: shared.sent.load(Ordering::Relaxed),
        most_in_flight: shared.most_in_flight.load(Ordering::Relaxed),
        held_back: shared.held_back.load(Ordering::Relaxed),
        connections: shared.connections.opened.load(Ordering::Relaxed),
        stray: shared.connections.stray.load(Ordering::Relaxed),
        stopped: stopped.is_some(),
        prompts: shared.jobs.len(),
        left_out: shared.jobs.left_out,
        threads,
        cpu_seconds: cpu_time().saturating_sub(cpu).as_secs_f64(),
    };
    Ok(Report::new(&options, &stats, &facts))
}

fn schedule(options: &LoadOptions) -> Result<Option<Schedule>, LoadError> {
    Ok(match &options.pace {
        Pace::Closed { .. } => None,
        Pace::Poisson { per_second } => Some(Schedule::poisson(*per_second, options.seed)),
        Pace::Recorded { arrivals, speed } => Some(Schedule::recorded(read_arrivals(arrivals)?).at_speed(*speed)),
    })
}

/// The threads of a run.
struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    stats: Vec<Arc<Mutex<Stats>>>,
    /// Closes when all threads are done.
    done: watch::Receiver<()>,
}

impl Workers {
    fn start(shared: &Arc<Shared>, options: &LoadOptions, schedule: Option<Schedule>) -> Result<Self, LoadError> {
        let files = open_files();
        let clients = match options.pace {
            Pace::Closed { concurrency } if concurrency > files => {
                let found = format!("{concurrency}, but this process may open {files} connections");
                return Err(LoadError::Option {
                    option: "concurrency",
                    found,
                    expected: "fewer, or a higher ulimit -n",
                });
            }
            Pace::Closed { concurrency } => concurrency,
            Pace::Poisson { .. } | Pace::Recorded { .. } => options.max_in_flight.min(files),
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let count = options.threads.unwrap_or(cores).min(clients);
        let (ended, done) = watch::channel(());
        let mut workers = Self { shared: Arc::clone(shared), threads: Vec::new(), stats: Vec::new(), done };
        let mut queues = Vec::new();
        for index in 0..count {
            let share = clients / count + usize::from(index < clients % count);
            let part = if schedule.is_some() {
                let (queue, due) = mpsc::channel::<Due>(QUEUE);
                queues.push(queue);
                Part::Open(due, share)
            } else {
                Part::Closed(share)
            };
            let stats = Arc::new(Mutex::new(Stats::new(shared.slo)));
            workers.stats.push(Arc::clone(&stats));
            let worker = Worker::new(Arc::clone(shared), stats);
            let ended = ended.clone();
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(LoadError::Start)?;
            workers.spawn(format!("load-{index}"), move || {
                runtime.block_on(worker.run(part));
                drop((runtime, ended));
            })?;
        }
        if let Some(schedule) = schedule {
            let shared = Arc::clone(shared);
            let ended = ended.clone();
            workers.spawn("load-pacer".into(), move || {
                pace(&shared, schedule, &queues);
                drop((queues, ended));
            })?;
        }
        Ok(workers)
    }

    fn spawn(&mut self, name: String, work: impl FnOnce() + Send + 'static) -> Result<(), LoadError> {
        let thread = std::thread::Builder::new().name(name).spawn(work);
        self.threads.push(thread.map_err(LoadError::Start)?);
        Ok(())
    }

    /// Shows how far the run is until all threads are done; when `stop` resolved first, returns when.
    async fn watch(&self, view: &(dyn Fn(&Snapshot) + Sync), stop: impl Future<Output = ()>) -> Option<Instant> {
        let mut done = self.done.clone();
        let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + VIEW_INTERVAL, VIEW_INTERVAL);
        let mut stopped = None;
        tokio::pin!(stop);
        loop {
            tokio::select! {
                // An error: all senders are gone.
                _ = done.changed() => return stopped,
                _ = ticks.tick() => view(&self.snapshot()),
                () = &mut stop, if stopped.is_none() => {
                    stopped = Some(Instant::now());
                    self.shared.stop.cancel();
                }
            }
        }
    }

    fn snapshot(&self) -> Snapshot {
        let stats = self.merged();
        Snapshot {
            elapsed: self.shared.elapsed(),
            ok: stats.ok,
            failed: stats.failed,
            in_flight: self.shared.in_flight.load(Ordering::Relaxed),
            output_tokens: stats.told.1.saturating_add(stats.untold.1),
            ttft: stats.ttft.summary(),
            e2e: stats.e2e.summary(),
        }
    }

    fn merged(&self) -> Stats {
        let mut merged = Stats::new(self.shared.slo);
        for stats in &self.stats {
            merged.merge(&stats.lock().unwrap_or_else(PoisonError::into_inner));
        }
        merged
    }

    fn end(mut self) -> Stats {
        for thread in self.threads.drain(..) {
            // A thread that panicked was reported by the panic itself.
            let _ = thread.join();
        }
        self.merged()
    }
}

impl Drop for Workers {
    /// A run that is dropped, or could not start all its threads, sends nothing more.
    fn drop(&mut self) {
        self.shared.stop.cancel();
    }
}

/// How many connections this process may open; the soft limit is raised to the hard one.
fn open_files() -> usize {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok();
    let most = if raised { maximum } else { current };
    let most = most.map_or(u64::MAX, |most| most.saturating_sub(OTHER_FILES).max(1));
    usize::try_from(most).unwrap_or(usize::MAX)
}

/// CPU time of this process.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}
