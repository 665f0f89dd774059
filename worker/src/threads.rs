//! Large computations on several threads. Each thread computes separate results (columns of a product, rows of
//! attention or of experts), so every sum has the order that it has on one thread.

use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Multiply-adds that justify waking a thread: a few tens of microseconds.
const WORK_OF_A_THREAD: usize = 1 << 20;

thread_local! {
    /// Threads that this thread's work may use, including itself.
    static THREADS: Cell<usize> = const { Cell::new(1) };
}

/// Runs `work` on a pool of `threads` threads, which share its large computations; on this thread if there is only one.
/// Threads inherit this one's CPU affinity.
///
/// # Errors
/// The operating system refuses more threads.
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

/// The number of threads to share this much work.
pub(crate) fn threads_for(multiply_adds: usize) -> usize {
    match THREADS.get() {
        1 => 1,
        threads => threads.min(multiply_adds / WORK_OF_A_THREAD).max(1),
    }
}

/// Runs both, concurrently if a thread is free. Products within them are not shared further.
pub(crate) fn both(first: impl FnOnce() + Send, second: impl FnOnce() + Send) {
    let threads = THREADS.replace(1);
    rayon::join(first, second);
    THREADS.set(threads);
}

/// Locks a mutex whose content is valid even if a thread panicked while it held the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
