//! Idle connections, for the next request to the same address.
//!
//! There is a list for each core, and a thread looks into its own first: threads do not wait for each other, and a
//! connection mostly stays where its socket is known.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use ::http::uri::{Authority, Scheme};
use tokio::sync::Notify;

use super::connection::Connection;

/// Time between two looks at idle connections: an engine that ends closes them.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// More lists than this are of no use to one engine.
const MAX_LISTS: usize = 64;

/// Where a connection leads. A plain connection is never taken for a secure one.
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
    /// In all lists.
    count: AtomicUsize,
    most: usize,
    keep: Duration,
    /// Whether a task closes unused ones.
    sweeping: AtomicBool,
    /// Connections closed for what the engine sent unasked.
    pub(super) strays: AtomicU64,
    /// Connections that the engine closed while they were kept or used.
    pub(super) broken: AtomicU64,
    /// Rings when an idle connection turns out to be closed.
    pub(super) lost: Notify,
}

static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The number of this thread, among those that use a pool.
    static THREAD: usize = THREADS.fetch_add(1, Ordering::Relaxed);
}

impl Pool {
    /// Keeps at most `most` connections, each for at most `keep`.
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

    /// The list that this thread looks into first.
    fn own_list(&self) -> usize {
        THREAD.with(|thread| thread % self.lists.len())
    }

    /// Counts a connection that ended, if the engine had sent something on it that was not requested.
    pub(super) fn note_stray(&self, ended: &Connection) {
        self.strays.fetch_add(u64::from(ended.stray), Ordering::Relaxed);
    }

    /// The engine closed a connection that was kept or in use.
    pub(super) fn note_broken(&self) {
        self.broken.fetch_add(1, Ordering::Relaxed);
    }

    /// The connection to `origin` that was used last, as the engine will keep that one longest.
    pub(super) fn take(&self, origin: &Origin) -> Option<Box<Connection>> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let (before, from) = self.lists.split_at(self.own_list());
        from.iter().chain(before).find_map(|list| {
            let mut list = list.lock().unwrap_or_else(PoisonError::into_inner);
            let at = list.iter().rposition(|idle| idle.origin == *origin)?;
            // Everything before it has waited longer.
            let Idle { connection, since, .. } = list.remove(at);
            self.count.fetch_sub(1, Ordering::Relaxed);
            drop(list);
            (since.elapsed() < self.keep).then_some(connection)
        })
    }

    /// Keeps a connection on which nothing is going on.
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

    /// Closes what has been idle for too long, and forgets what the engine closed; returns how many are left.
    fn sort_out(&self) -> usize {
        // Nothing is woken: the next look comes anyway, and a connection is polled again when it is taken.
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

/// Runs while there are idle connections.
async fn sweep(pool: Weak<Pool>, keep: Duration) {
    loop {
        tokio::time::sleep(LOOK_INTERVAL.min(keep / 2)).await;
        let Some(pool) = pool.upgrade() else { return };
        if pool.sort_out() == 0 {
            pool.sweeping.store(false, Ordering::Release);
            // One that came in between has seen the flag as it was.
            if pool.count.load(Ordering::Acquire) == 0 || pool.sweeping.swap(true, Ordering::AcqRel) {
                return;
            }
        }
    }
}
