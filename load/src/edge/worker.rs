//! A sending thread with its own runtime, connections and statistics, so that workers do not wait for each other.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::sync::mpsc::Receiver;

use super::connection::Connections;
use super::exchange::Seen;
use super::pacer::Due;
use super::shared::{InFlight, Shared};
use crate::Failure;
use crate::stats::{Sample, Stats};
use crate::window::Ticket;

/// Pause of a closed-loop client after a failed connection attempt, so that a dead server is not flooded.
const PAUSE_AFTER_NO_CONNECTION: Duration = Duration::from_millis(10);

const BACKEND: &str = "x-semmoe-backend";
const RANK: &str = "x-semmoe-rank";

/// The work assigned to one worker.
#[derive(Debug)]
pub(crate) enum Part {
    /// The number of clients.
    Closed(usize),
    /// Requests as they become due, and the maximum in flight.
    Open(Receiver<Due>, usize),
}

#[derive(Debug)]
pub(crate) struct Worker {
    shared: Arc<Shared>,
    connections: Connections,
    /// Locked occasionally by the progress view, otherwise only by this worker.
    stats: Arc<Mutex<Stats>>,
}

impl Worker {
    pub(crate) fn new(shared: Arc<Shared>, stats: Arc<Mutex<Stats>>) -> Arc<Self> {
        let connections = Connections::new(Arc::clone(&shared.target), Arc::clone(&shared.connections));
        Arc::new(Self { shared, connections, stats })
    }

    /// Runs until the run is over; after a stop, requests still in flight at the end of the grace period are dropped.
    pub(crate) async fn run(self: Arc<Self>, part: Part) {
        let shared = Arc::clone(&self.shared);
        let given_up = async {
            shared.stop.cancelled().await;
            tokio::time::sleep(shared.options.grace).await;
        };
        tokio::select! {
            () = self.work(part) => {}
            () = given_up => {}
        }
    }

    async fn work(self: Arc<Self>, part: Part) {
        match part {
            Part::Closed(clients) => {
                let clients: Vec<_> = (0..clients).map(|_| tokio::spawn(Arc::clone(&self).client())).collect();
                for client in clients {
                    // A panic in a client has already been reported.
                    let _ = client.await;
                }
            }
            Part::Open(due, most) => self.open_loop(due, most).await,
        }
    }

    /// Runs one client of a closed loop.
    async fn client(self: Arc<Self>) {
        loop {
            let begin = Instant::now();
            let Some(ticket) = self.shared.ticket(begin) else { return };
            if let Err(Failure::Connect(_)) = self.one(ticket, begin, None).await {
                tokio::time::sleep(PAUSE_AFTER_NO_CONNECTION).await;
            }
        }
    }

    async fn open_loop(self: Arc<Self>, mut due: Receiver<Due>, most: usize) {
        let permits = Arc::new(Semaphore::new(most));
        while let Some(Due { ticket, at }) = due.recv().await {
            if permits.available_permits() == 0 {
                self.shared.held_back.fetch_add(1, Ordering::Relaxed);
            }
            let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
            if self.shared.stop.is_cancelled() {
                break;
            }
            let worker = Arc::clone(&self);
            tokio::spawn(async move {
                let _ = worker.one(ticket, at, Some(at)).await;
                drop(permit);
            });
        }
        // Close the channel so that the pacer ends.
        drop(due);
        let all = u32::try_from(most).unwrap_or(u32::MAX);
        let _ = permits.acquire_many(all).await;
    }

    /// Sends one request now, with latencies measured from `due`; `scheduled` is the due time in an open loop.
    async fn one(&self, ticket: Ticket, due: Instant, scheduled: Option<Instant>) -> Result<(), Failure> {
        let shared = &*self.shared;
        let late = scheduled.map(|at| at.elapsed());
        let _in_flight = InFlight::begin(shared);
        if ticket.measured {
            shared.sent.fetch_add(1, Ordering::Relaxed);
        }
        let mut seen = Seen::default();
        let on_gap = |gap| {
            if ticket.measured {
                self.stats().gaps.record(gap);
            }
        };
        let exchange = seen.exchange(
            &self.connections,
            due,
            shared.jobs.body(shared.place.first_prompt.wrapping_add(ticket.number)),
            shared.options.stream,
            on_gap,
        );
        let result = match tokio::time::timeout(shared.options.timeout, exchange).await {
            Ok(result) => result,
            Err(_) => Err(Failure::Timeout(seen.phase())),
        };
        let label = |name| seen.headers.as_ref()?.get(name)?.to_str().ok();
        self.stats().request(&Sample {
            measured: ticket.measured,
            in_window: shared.window.ended(ticket, Instant::now()),
            late,
            result,
            has_head: seen.headers.is_some(),
            backend: label(BACKEND),
            rank: label(RANK),
        });
        result.map(|_| ())
    }

    fn stats(&self) -> std::sync::MutexGuard<'_, Stats> {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
