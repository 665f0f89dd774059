//! Idle connections, for the next request to the same address.
//!
//! There is a list for each core, and a thread looks into its own first: threads do not wait for each other, and a
//! connection mostly stays where its socket is known.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use ::http::uri::{Authority, Scheme};

use super::connection::Connection;

/// More lists than this are of no use to one engine.
const MOST_LISTS: usize = 64;

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
    /// Whether a task closes those that nobody asks for.
    sweeping: AtomicBool,
    /// Connections closed for what the engine sent unasked.
    strays: AtomicU64,
    /// Connections that the engine closed while they were kept or used.
    broken: AtomicU64,
}

thread_local! {
    static LIST: Cell<Option<usize>> = const { Cell::new(None) };
}

/// The list of this thread, in a pool with as many as there are threads.
fn own_list() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    LIST.with(|list| {
        list.get().unwrap_or_else(|| {
            let next = NEXT.fetch_add(1, Ordering::Relaxed);
            list.set(Some(next));
            next
        })
    })
}

impl Pool {
    /// Keeps at most `most` connections, each for at most `keep`.
    pub(super) fn new(most: usize, keep: Duration) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            lists: (0..cores.min(MOST_LISTS)).map(|_| Mutex::default()).collect(),
            count: AtomicUsize::new(0),
            most,
            keep,
            sweeping: AtomicBool::new(false),
            strays: AtomicU64::new(0),
            broken: AtomicU64::new(0),
        }
    }

    /// A connection is closed as the engine sent something on it that nobody asked for.
    pub(super) fn note_stray(&self) {
        self.strays.fetch_add(1, Ordering::Relaxed);
    }

    /// How many were, since this was asked last.
    pub(super) fn take_strays(&self) -> u64 {
        self.strays.swap(0, Ordering::Relaxed)
    }

    /// The engine closed a connection that was kept or in use.
    pub(super) fn note_broken(&self) {
        self.broken.fetch_add(1, Ordering::Relaxed);
    }

    /// How many it closed since the last call.
    pub(super) fn take_broken(&self) -> u64 {
        self.broken.swap(0, Ordering::Relaxed)
    }

    /// The connection to `origin` that was used last, as the engine will keep that one longest.
    pub(super) fn take(&self, origin: &Origin) -> Option<Box<Connection>> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let own = own_list() % self.lists.len();
        let (before, from) = self.lists.split_at(own);
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
        self.lists[own_list() % self.lists.len()].lock().unwrap_or_else(PoisonError::into_inner).push(idle);
        if !self.sweeping.load(Ordering::Relaxed) && !self.sweeping.swap(true, Ordering::AcqRel) {
            tokio::spawn(sweep(Arc::downgrade(self), self.keep));
        }
    }

    /// Closes what has been idle for too long; returns how many are left.
    fn close_old(&self) -> usize {
        let mut left = 0;
        for list in &self.lists {
            let mut list = list.lock().unwrap_or_else(PoisonError::into_inner);
            // They stand in the order in which they came.
            let old = list.partition_point(|idle| idle.since.elapsed() >= self.keep);
            let closed: Vec<Idle> = list.drain(..old).collect();
            left += list.len();
            drop(list);
            self.count.fetch_sub(closed.len(), Ordering::Relaxed);
        }
        left
    }
}

/// Runs while there are idle connections.
async fn sweep(pool: Weak<Pool>, keep: Duration) {
    loop {
        tokio::time::sleep(keep / 2).await;
        let Some(pool) = pool.upgrade() else { return };
        if pool.close_old() == 0 {
            pool.sweeping.store(false, Ordering::Release);
            // One that came in between has seen the flag as it was.
            if pool.count.load(Ordering::Acquire) == 0 || pool.sweeping.swap(true, Ordering::AcqRel) {
                return;
            }
        }
    }
}
