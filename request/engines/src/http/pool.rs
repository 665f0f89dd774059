//! A pool of idle connections, reused by requests to the same address.
//!
//! There is one list per core, and a thread searches its own list first, so threads rarely contend and a connection
//! mostly stays on the core where its socket is cached.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use ::http::uri::{Authority, Scheme};
use tokio::sync::Notify;

use super::connection::Connection;

/// Interval between checks for idle connections closed by a terminating engine.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum number of lists; more would not help.
const MAX_LISTS: usize = 64;

/// The endpoint of a connection. A plaintext connection is never reused for https.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Origin {
    pub(super) secure: bool,
    pub(super) authority: Authority,
}

impl Origin {
    pub(super) fn of(scheme: Option<&Scheme>, authority: Option<Authority>) -> Option<Self> {
        Some(Self { secure: scheme == Some(&Scheme::HTTPS), authority: authority? })
    }

    pub(super) fn scheme(&self) -> &'static str {
        if self.secure { "https" } else { "http" }
    }
}

struct Idle {
    origin: Origin,
    connection: Box<Connection>,
    since: Instant,
}

pub(super) struct Pool {
    lists: Box<[Mutex<Vec<Idle>>]>,
    /// Number of connections in all lists.
    count: AtomicUsize,
    most: usize,
    keep: Duration,
    /// Whether the task that closes unused connections is running.
    sweeping: AtomicBool,
    /// Connections closed because the engine sent unsolicited bytes.
    pub(super) strays: AtomicU64,
    /// Connections closed by the engine while idle or in use.
    pub(super) broken: AtomicU64,
    /// Notified when an idle connection is found to be closed.
    pub(super) lost: Notify,
}

static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// This thread's index among the threads that use a pool.
    static THREAD: usize = THREADS.fetch_add(1, Ordering::Relaxed);
}

impl Pool {
    /// Creates a pool of at most `most` idle connections, each kept for at most `keep`.
    pub(super) fn new(most: usize, keep: Duration) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            lists: (0..cores.min(MAX_LISTS)).map(|_| Mutex::default()).collect(),
            count: AtomicUsize::new(0),
            most,
            keep,
            sweeping: AtomicBool::new(false),
            strays: AtomicU64::new(0),
            broken: AtomicU64::new(0),
            lost: Notify::new(),
        }
    }

    /// Returns the index of the list that this thread searches first.
    fn own_list(&self) -> usize {
        THREAD.with(|thread| thread % self.lists.len())
    }

    /// Counts a connection that ended because the engine sent unsolicited bytes.
    pub(super) fn note_stray(&self, ended: &Connection) {
        self.strays.fetch_add(u64::from(ended.stray), Ordering::Relaxed);
    }

    /// Counts a connection closed by the engine while idle or in use.
    pub(super) fn note_broken(&self) {
        self.broken.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes and returns the most recently used connection to `origin`, which the engine will keep open longest.
    pub(super) fn take(&self, origin: &Origin) -> Option<Box<Connection>> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let (before, from) = self.lists.split_at(self.own_list());
        from.iter().chain(before).find_map(|list| {
            let mut list = list.lock().unwrap_or_else(PoisonError::into_inner);
            let at = list.iter().rposition(|idle| idle.origin == *origin)?;
            // All earlier connections have been idle for longer.
            let Idle { connection, since, .. } = list.remove(at);
            self.count.fetch_sub(1, Ordering::Relaxed);
            drop(list);
            (since.elapsed() < self.keep).then_some(connection)
        })
    }

    /// Adds an idle connection to the pool.
    pub(super) fn put(self: &Arc<Self>, origin: Origin, connection: Box<Connection>) {
        if self.count.fetch_add(1, Ordering::Relaxed) >= self.most {
            self.count.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let idle = Idle { origin, connection, since: Instant::now() };
        self.lists[self.own_list()].lock().unwrap_or_else(PoisonError::into_inner).push(idle);
        if !self.sweeping.load(Ordering::Relaxed) && !self.sweeping.swap(true, Ordering::AcqRel) {
            tokio::spawn(sweep(Arc::downgrade(self), self.keep));
        }
    }

    /// Closes connections that have been idle for too long, and removes those closed by the engine; returns how many
    /// are left.
    fn sort_out(&self) -> usize {
        // No waker is needed: the next check polls again, and so does reusing a connection.
        let mut cx = Context::from_waker(Waker::noop());
        let (mut left, mut is_lost) = (0, false);
        for list in &self.lists {
            let mut list = list.lock().unwrap_or_else(PoisonError::into_inner);
            let before = list.len();
            list.retain_mut(|Idle { connection, since, .. }| {
                if since.elapsed() >= self.keep {
                    return false;
                }
                let is_usable = connection.is_usable(&mut cx);
                if !is_usable {
                    is_lost = true;
                    self.note_broken();
                    self.note_stray(connection);
                }
                is_usable
            });
            left += list.len();
            self.count.fetch_sub(before - list.len(), Ordering::Relaxed);
        }
        if is_lost {
            self.lost.notify_one();
        }
        left
    }
}

/// Checks the pool periodically while it has idle connections.
async fn sweep(pool: Weak<Pool>, keep: Duration) {
    loop {
        tokio::time::sleep(LOOK_INTERVAL.min(keep / 2)).await;
        let Some(pool) = pool.upgrade() else { return };
        if pool.sort_out() == 0 {
            pool.sweeping.store(false, Ordering::Release);
            // A connection added in between saw the flag still set and started no task, so check again.
            if pool.count.load(Ordering::Acquire) == 0 || pool.sweeping.swap(true, Ordering::AcqRel) {
                return;
            }
        }
    }
}
