//! The clock of an open loop: a thread of its own that hands each request to a worker when it is due.
//!
//! A thread that sleeps is more exact than the runtime's timers, which tick in milliseconds, and is not held up by
//! answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::Sender;

use super::shared::Shared;
use crate::schedule::Schedule;
use crate::window::Ticket;

/// The longest sleep, so that a stop is noticed.
const MAX_SLEEP: Duration = Duration::from_millis(50);

/// A request and when it is due.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Due {
    pub(crate) ticket: Ticket,
    pub(crate) at: Instant,
}

/// Hands out requests in turn until the schedule, the limit or the caller ends it.
///
/// A worker whose queue is full is waited for: the request keeps the time it was due.
pub(crate) fn pace(shared: &Arc<Shared>, schedule: Schedule, workers: &[Sender<Due>]) {
    let begin = Instant::now();
    for (time, worker) in schedule.zip(workers.iter().cycle()) {
        let Some(at) = begin.checked_add(time) else { return };
        // Before the wait: a request that is due after the end of the run is not waited for.
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
