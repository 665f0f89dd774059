//! Runs large computations on several threads. Each thread computes separate results (columns of a product, rows of
//! attention or of experts), so every sum is accumulated in the same order as on a single thread.

use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Multiply-adds that justify waking a thread: a few tens of microseconds of work.
const WORK_OF_A_THREAD: usize = 1 << 20;

thread_local! {
    /// Number of threads that work on this thread may use, including the thread itself.
    static THREADS: Cell<usize> = const { Cell::new(1) };
}

/// Runs `work` on a pool of `threads` threads that share its large computations, or on the calling thread if there is
/// only one. Pool threads inherit the caller's CPU affinity.
///
/// # Errors
/// Fails if the operating system cannot create the threads.
pub fn with_threads<R: Send>(
    threads: usize,
    work: impl FnOnce() -> R + Send,
) -> Result<R, rayon::ThreadPoolBuildError> {
    if threads <= 1 {
        return Ok(work());
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("compute-{i}")).build()?;
    Ok(pool.install(|| {
        THREADS.set(threads);
        work()
    }))
}

/// Returns how many threads should share this much work.
pub(crate) fn threads_for(multiply_adds: usize) -> usize {
    match THREADS.get() {
        1 => 1,
        threads => threads.min(multiply_adds / WORK_OF_A_THREAD).max(1),
    }
}

/// Runs both closures, concurrently if a thread is free. Matrix products within them run on a single thread.
pub(crate) fn both(first: impl FnOnce() + Send, second: impl FnOnce() + Send) {
    let threads = THREADS.replace(1);
    rayon::join(first, second);
    THREADS.set(threads);
}

/// Locks a mutex whose content stays valid even if a thread panics while holding the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
