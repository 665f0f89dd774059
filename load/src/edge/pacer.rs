//! The clock of an open loop: a separate thread that hands each request to a worker when it is due.
//!
//! A sleeping thread is more precise than the runtime's timers, which have millisecond resolution, and is not delayed
//! by the processing of responses.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::Sender;

use super::shared::Shared;
use crate::schedule::Schedule;
use crate::window::Ticket;

/// Maximum sleep, so that a stop is detected soon.
const MAX_SLEEP: Duration = Duration::from_millis(50);

/// A request and its due time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Due {
    pub(crate) ticket: Ticket,
    pub(crate) at: Instant,
}

/// Hands requests to the workers in round-robin order until the schedule, the limit or the caller ends the run.
///
/// If a worker's queue is full, waits for that worker; the request keeps its due time.
pub(crate) fn pace(shared: &Arc<Shared>, schedule: Schedule, workers: &[Sender<Due>]) {
    let begin = Instant::now();
    for (time, worker) in schedule.zip(workers.iter().cycle()) {
        let Some(at) = begin.checked_add(time) else { return };
        // Check before sleeping, so that the pacer does not wait for a request that is due after the end of the run.
        let Some(ticket) = shared.ticket(at) else { return };
        while let Some(left) = at.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            if shared.stop.is_cancelled() {
                return;
            }
            std::thread::sleep(left.min(MAX_SLEEP));
        }
        if worker.blocking_send(Due { ticket, at }).is_err() {
            return;
        }
    }
    shared.window.schedule_ended();
}
