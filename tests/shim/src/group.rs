//! Synchronises ranks that are threads: the last one to arrive runs everyone's items.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a rank waits for the others. Far above any test's need, so that a defect of a test is an error, not a hang.
const PATIENCE: Duration = Duration::from_secs(120);

type Run<I> = dyn Fn(Vec<Option<I>>, u64) -> Result<(), String> + Send + Sync;

/// The ranks of a unit.
pub struct Group<I> {
    meeting: Mutex<Meeting<I>>,
    changed: Condvar,
    run: Box<Run<I>>,
}

struct Meeting<I> {
    ranks: Vec<Presence<I>>,
    /// Completed rounds.
    round: u64,
    /// Result of the last round.
    ended: Result<(), String>,
}

enum Presence<I> {
    /// Not entered, or between calls.
    Away,
    There(I),
    Left,
}

impl<I> Group<I> {
    /// A group whose ranks are all away. `run` gets the item of each rank, `None` for ranks that have left, and the
    /// round's number.
    pub fn new(ranks: usize, run: impl Fn(Vec<Option<I>>, u64) -> Result<(), String> + Send + Sync + 'static) -> Self {
        let ranks = (0..ranks).map(|_| Presence::Away).collect();
        let meeting = Mutex::new(Meeting { ranks, round: 0, ended: Ok(()) });
        Self { meeting, changed: Condvar::new(), run: Box::new(run) }
    }

    /// Number of ranks, including those that have left.
    pub fn ranks(&self) -> usize {
        self.lock().ranks.len()
    }

    /// Whether the ranks have synchronised: from then on one may wait in a kernel whenever another calls the driver.
    pub fn has_synchronised(&self) -> bool {
        self.lock().round > 0
    }

    fn lock(&self) -> MutexGuard<'_, Meeting<I>> {
        self.meeting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, meeting: &mut Meeting<I>) {
        let take = |rank: &mut Presence<I>| match std::mem::replace(rank, Presence::Away) {
            Presence::There(item) => Some(item),
            Presence::Left => {
                *rank = Presence::Left;
                None
            }
            Presence::Away => None,
        };
        let items = meeting.ranks.iter_mut().map(take).collect();
        meeting.round += 1;
        meeting.ended = (self.run)(items, meeting.round);
    }

    /// Waits for all ranks that have not left; returns when their items have run.
    ///
    /// # Errors
    /// A run that failed, a rank that does not arrive.
    pub fn arrive(&self, rank: usize, item: I) -> Result<(), String> {
        let until = Instant::now() + PATIENCE;
        let mut meeting = self.lock();
        meeting.ranks[rank] = Presence::There(item);
        let mine = meeting.round;
        loop {
            if meeting.round != mine {
                return meeting.ended.clone();
            }
            if !meeting.ranks.iter().any(|rank| matches!(rank, Presence::Away)) {
                self.run(&mut meeting);
                self.changed.notify_all();
                continue;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                meeting.ranks[rank] = Presence::Away;
                return Err(format!("not all ranks arrived within {} s", PATIENCE.as_secs()));
            }
            meeting = self.changed.wait_timeout(meeting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Adds the rank to those waited for, also if it had left.
    pub fn enter(&self, rank: usize) {
        self.lock().ranks[rank] = Presence::Away;
    }

    /// Removes the rank from now on.
    pub fn leave(&self, rank: usize) {
        self.lock().ranks[rank] = Presence::Left;
        self.changed.notify_all();
    }
}
