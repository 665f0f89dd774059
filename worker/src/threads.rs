//! Large work on several threads. Each thread has results of its own (columns of a product, rows of attention or of
//! experts), so that every sum has the order it has on one.

use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Multiply-adds that are worth waking a thread for: some tens of microseconds.
const WORK_OF_A_THREAD: usize = 1 << 20;

thread_local! {
    /// Threads that work of this thread may use, itself among them.
    static THREADS: Cell<usize> = const { Cell::new(1) };
}

/// Runs `work` on a pool of `threads` threads, which share its large work; on this thread if it is only one. Threads
/// begin with this one's processor affinity.
///
/// # Errors
/// The operating system gives no more threads.
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

/// The number of threads that share this much work.
pub(crate) fn shares(multiply_adds: usize) -> usize {
    match THREADS.get() {
        1 => 1,
        threads => threads.min(multiply_adds / WORK_OF_A_THREAD).max(1),
    }
}

/// Does both, at once where a thread is free. Products within them are shared no further.
pub(crate) fn both(first: impl FnOnce() + Send, second: impl FnOnce() + Send) {
    let threads = THREADS.replace(1);
    rayon::join(first, second);
    THREADS.set(threads);
}

/// Locks a mutex whose content is valid even if a thread panicked while it held the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
