//! Returns freed memory to the system.
//!
//! glibc retains freed memory located below a longer-lived allocation: 16,000 closed streams left 110 MB. The process
//! size is therefore compared periodically with the memory that requests hold, and if it has grown by more than that,
//! the allocator is instructed to return free pages. Other allocators (jemalloc, musl's) do so by themselves; with them
//! this costs a file read every few seconds.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::data::DataPlane;

const EVERY: Duration = Duration::from_secs(2);
/// Growth that justifies a walk over the allocator's free lists, which takes milliseconds.
const WORTH_BYTES: usize = 16 << 20;
/// Minimum memory of a stream or connection apart from its body. A higher estimate would hide unreturned memory.
const STREAM_BYTES: usize = 4 << 10;

/// Maximum pause, in polls (five minutes). After a walk that freed little, the pause doubles, because the memory may be
/// in use.
const MAX_PAUSE: u32 = 150;

/// Polls the process size until `stop` is cancelled.
pub(crate) async fn watch(plane: Arc<DataPlane>, stop: CancellationToken) {
    let Some(mut least) = resident_bytes() else { return };
    let (mut pause, mut looks, mut held_before) = (1, 0, 0);
    while stop.run_until_cancelled(tokio::time::sleep(EVERY)).await.is_some() {
        let held = plane.body_memory.held_bytes()
            + plane.answer_memory.held_bytes()
            + plane.metrics.trust.open_exchanges() * STREAM_BYTES;
        // Requests that ended since the last walk left reclaimable pages.
        if held_before >= held + WORTH_BYTES {
            (pause, held_before) = (1, held);
        }
        held_before = held_before.max(held);
        let Some(now) = resident_bytes() else { return };
        least = least.min(now);
        looks += 1;
        if looks < pause || now.saturating_sub(held) <= least.saturating_add(WORTH_BYTES) {
            continue;
        }
        // Off the network threads, because it takes each of the allocator's locks in turn.
        let _ = tokio::task::spawn_blocking(give_back).await;
        let freed = now.saturating_sub(resident_bytes().unwrap_or(now));
        tracing::debug!(before_bytes = now, freed_bytes = freed, "returned unused memory to the system");
        pause = if freed >= WORTH_BYTES / 2 { 1 } else { (2 * pause).min(MAX_PAUSE) };
        looks = 0;
    }
}

/// Returns the resident memory; `None` if the system does not report it.
fn resident_bytes() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"))?;
    Some(kilobytes.parse::<usize>().ok()? << 10)
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn give_back() {
    // SAFETY: `malloc_trim` may be called at any time on any thread; it touches only free memory.
    unsafe { libc::malloc_trim(0) };
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn give_back() {}
