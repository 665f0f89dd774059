//! Large products on several threads. Each thread has columns of its own, so that every sum has the order it has on one.

use std::cell::Cell;

/// Multiply-adds that are worth waking a thread for: some tens of microseconds.
const WORK_OF_A_THREAD: usize = 1 << 20;

thread_local! {
    /// Threads that products of this thread may use, itself among them.
    static THREADS: Cell<usize> = const { Cell::new(1) };
}

/// Runs `work` on a pool of so many threads, which share its large products; on this thread if it is one. Threads begin with
/// this one's processor affinity.
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

/// Into how many parts of whole panels a product is cut.
pub(super) fn parts(multiply_adds: usize, panels: usize) -> usize {
    match THREADS.get() {
        1 => 1,
        threads => threads.min(multiply_adds / WORK_OF_A_THREAD).min(panels).max(1),
    }
}
