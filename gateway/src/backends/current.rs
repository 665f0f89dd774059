//! The current snapshot, replaced atomically and read without a lock.
//!
//! Replaced state is retained here until no request uses it, and is freed at the next change or the next file poll.
//! Otherwise the last request to drop it would free tables and tokenizers on its own thread, which takes longer than
//! the swap itself.

use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, Guard};
use rustix::time::{ClockId, clock_gettime};

use crate::backends::pool::Pool;
use crate::backends::{LoadedTables, Model, Snapshot, Text};
use crate::observe::Waits;

/// A replaced part of a snapshot, retained until it is unused.
type Held = Arc<dyn Send + Sync>;

/// The current snapshot.
pub(crate) struct Current {
    snapshot: ArcSwap<Snapshot>,
    /// Number of changes in progress; snapshot reads are timed while there are any.
    changes: AtomicUsize,
    waits: Waits,
    replaced: Mutex<Vec<Held>>,
}

/// A change in progress; snapshot reads are timed until it is dropped.
pub(crate) struct Change<'a>(&'a AtomicUsize);

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Current {
    pub(crate) fn new(snapshot: Snapshot, waits: Waits) -> Self {
        Self {
            snapshot: ArcSwap::from_pointee(snapshot),
            changes: AtomicUsize::new(0),
            waits,
            replaced: Mutex::default(),
        }
    }

    /// Returns the current snapshot, for short-lived use.
    pub(crate) fn load(&self) -> Guard<Arc<Snapshot>> {
        self.timed(ArcSwap::load)
    }

    /// Returns the current snapshot, for long-lived use.
    pub(crate) fn load_full(&self) -> Arc<Snapshot> {
        self.timed(ArcSwap::load_full)
    }

    fn timed<T: Deref>(&self, read: impl FnOnce(&ArcSwap<Snapshot>) -> T) -> T {
        if self.changes.load(Ordering::Relaxed) == 0 {
            return read(&self.snapshot);
        }
        let (began, began_cpu) = (Instant::now(), cpu_time());
        let snapshot = read(&self.snapshot);
        let (cpu, wall) = (cpu_time() - began_cpu, began.elapsed());
        self.waits.cpu.observe(cpu);
        self.waits.wall.observe(wall.as_secs_f64());
        snapshot
    }

    /// Begins a change. Until it is dropped, snapshot reads by requests are timed.
    pub(crate) fn change(&self) -> Change<'_> {
        self.changes.fetch_add(1, Ordering::Relaxed);
        Change(&self.changes)
    }

    /// Installs the next snapshot and retains the old one. Returns the time until readers saw the new one.
    pub(crate) fn store(&self, next: Arc<Snapshot>) -> Duration {
        let given = Arc::clone(&next);
        let complete = Instant::now();
        let before = self.snapshot.swap(given);
        let took = complete.elapsed();
        let mut held = large_parts(&before);
        let stays = large_parts(&next);
        held.retain(|part| !stays.iter().any(|it| Arc::ptr_eq(it, part)));
        held.push(before);
        self.replaced.lock().unwrap_or_else(PoisonError::into_inner).extend(held);
        took
    }

    /// Frees the parts that no request uses any more. Must not run on a network thread.
    pub(crate) fn sweep(&self) {
        loop {
            let mut replaced = self.replaced.lock().unwrap_or_else(PoisonError::into_inner);
            let free: Vec<Held> = replaced.extract_if(.., |held| Arc::strong_count(held) == 1).collect();
            drop(replaced);
            // Freeing one part can release others: repeat until none is left to free.
            if free.is_empty() {
                return;
            }
        }
    }

    /// Whether any replaced parts remain to be freed.
    pub(crate) fn holds_replaced(&self) -> bool {
        !self.replaced.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}

/// CPU time of this thread, in seconds.
fn cpu_time() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Lists the parts that are slow to free, separately, because a request may hold a part without holding the snapshot.
fn large_parts(snapshot: &Snapshot) -> Vec<Held> {
    let mut parts: Vec<Held> = Vec::new();
    for model in &snapshot.models {
        parts.push(Arc::<Model>::clone(model));
        parts.push(Arc::<Pool>::clone(&model.pool));
        parts.extend(model.text.iter().map(|text| -> Held { Arc::<Text>::clone(text) }));
        let tables = model.members.iter().filter_map(|member| member.tables.as_ref());
        parts.extend(tables.map(|tables| -> Held { Arc::<LoadedTables>::clone(tables) }));
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::observe::metrics::Metrics;

    fn current(metrics: &Metrics) -> Current {
        let toml = "[[models]]\nname = \"m\"\npolicy = \"least_load\"\n[[models.backends]]\nname = \"b\"\nengine = \"vllm\"\n\
                    url = \"http://b\"\nranks = 1\n";
        let config = Arc::new(Config::from_toml(toml, std::path::Path::new("")).unwrap());
        Current::new(crate::shell::load::snapshot(&config, metrics).unwrap(), metrics.tables.waits())
    }

    /// The next snapshot, with a copy of the model.
    fn next(current: &Current) -> Arc<Snapshot> {
        let now = current.load_full();
        let models = now.models.iter().map(|model| Arc::new(Model::clone(model))).collect();
        Arc::new(now.with_models(Arc::clone(&now.config), models))
    }

    /// If a request still holds the model but none holds the snapshot, the request does not free the model.
    #[test]
    fn what_a_request_has_is_freed_by_a_sweep_after_it_ended() {
        let current = current(&Metrics::new());
        let request = Arc::clone(&current.load_full().models[0]);
        let model = Arc::downgrade(&request);
        let pool = Arc::downgrade(&request.pool);
        current.store(next(&current));
        current.sweep();
        assert!(current.holds_replaced());
        drop(request);
        assert!(model.upgrade().is_some(), "the request's end frees nothing");
        current.sweep();
        assert!(model.upgrade().is_none() && !current.holds_replaced());
        assert!(pool.upgrade().is_some(), "the next snapshot has the same pool");
    }

    /// However often the snapshot is replaced, shared parts are retained only once.
    #[test]
    fn what_stays_is_not_held() {
        let current = current(&Metrics::new());
        let pool = Arc::downgrade(&current.load_full().models[0].pool);
        for _ in 0..100 {
            current.store(next(&current));
        }
        current.sweep();
        assert!(!current.holds_replaced());
        assert_eq!(pool.strong_count(), 1);
    }

    #[test]
    fn reads_are_timed_while_something_changes() {
        let metrics = Metrics::new();
        let current = current(&metrics);
        let timed = || {
            let text = metrics.encode(crate::observe::metrics::TextFormat::OpenMetrics);
            let line = text.lines().find(|line| line.starts_with("semmoe_swap_wait_seconds_count{clock=\"cpu\"}"));
            line.and_then(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).unwrap_or(0)
        };
        drop(current.load());
        assert_eq!(timed(), 0);
        let change = current.change();
        drop((current.load(), current.load_full()));
        assert_eq!(timed(), 2);
        drop(change);
        drop(current.load());
        assert_eq!(timed(), 2);
    }
}
