//! The threads of a run, and their progress.

use std::future::Future;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};

use super::pacer::{Due, pace};
use super::run::Snapshot;
use super::shared::Shared;
use super::worker::{Part, Worker};
use crate::schedule::Schedule;
use crate::stats::Stats;
use crate::{LoadError, Pace};

/// Maximum number of requests queued for a worker.
const QUEUE: usize = 256;
/// Interval between progress reports to the caller.
const VIEW_INTERVAL: Duration = Duration::from_secs(1);
/// Number of open files reserved for other purposes than connections.
const OTHER_FILES: u64 = 64;

/// The threads of a run.
pub(crate) struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Statistics of each sending thread.
    pub(super) stats: Vec<Arc<Mutex<Stats>>>,
    /// Closes when all threads are done.
    done: watch::Receiver<()>,
}

impl Workers {
    pub(crate) fn start(shared: &Arc<Shared>, schedule: Option<Schedule>) -> Result<Self, LoadError> {
        let (options, files) = (&shared.options, open_files());
        let clients = match options.pace {
            Pace::Closed { concurrency } if concurrency > files => {
                let found = format!("{concurrency}, but this process can open only {files} connections");
                return Err(LoadError::option("concurrency", found, "fewer, or a higher ulimit -n"));
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
            let stats = Arc::new(Mutex::new(Stats::new(options.slo)));
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

    /// Reports progress until all threads are done; returns the time at which `stop` resolved, if it did so before.
    pub(crate) async fn watch(
        &self,
        view: &(dyn Fn(&Snapshot) + Sync),
        stop: impl Future<Output = ()>,
    ) -> Option<Instant> {
        let mut done = self.done.clone();
        let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + VIEW_INTERVAL, VIEW_INTERVAL);
        let mut stopped = None;
        tokio::pin!(stop);
        loop {
            tokio::select! {
                // An error means that all senders are gone.
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
            block: self.shared.place.block,
            elapsed: self.shared.window.begin.get().map(Instant::elapsed),
            ok: stats.ok,
            failed: stats.failed,
            in_flight: self.shared.in_flight.load(Ordering::Relaxed),
            output_tokens: stats.reported.1.saturating_add(stats.counted.1),
            ttft: stats.ttft.summary(),
            e2e: stats.e2e.summary(),
        }
    }

    fn merged(&self) -> Stats {
        let mut merged = Stats::new(self.shared.options.slo);
        for stats in &self.stats {
            merged.merge(&stats.lock().unwrap_or_else(PoisonError::into_inner));
        }
        merged
    }

    pub(crate) fn end(mut self) -> Stats {
        for thread in self.threads.drain(..) {
            // A panic in a thread has already been reported.
            let _ = thread.join();
        }
        self.merged()
    }
}

impl Drop for Workers {
    /// Stops sending if a run is dropped or could not start all its threads.
    fn drop(&mut self) {
        self.shared.stop.cancel();
    }
}

/// Returns the number of connections that this process may open, after raising the soft limit to the hard limit.
fn open_files() -> usize {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok();
    let most = if raised { maximum } else { current };
    let most = most.map_or(u64::MAX, |most| most.saturating_sub(OTHER_FILES).max(1));
    usize::try_from(most).unwrap_or(usize::MAX)
}
