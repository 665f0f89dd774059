//! A counter that is incremented on each change, on which threads of any process can sleep.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use rustix::thread::futex;

/// A bell in memory shared by its waiters; all zeros is a bell that has not rung yet. A thread misses no change if it
/// reads [`Bell::rings`], then checks for the change, and then sleeps with the value read.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Bell {
    rings: AtomicU32,
    /// Number of threads that may be asleep. Threads of a killed process stay counted, which costs a system call per
    /// ring.
    waiters: AtomicU32,
}

impl Bell {
    /// Returns the number of rings so far, modulo 2^32.
    #[must_use]
    pub fn rings(&self) -> u32 {
        self.rings.load(SeqCst)
    }

    /// Wakes all sleeping threads. Makes a system call only if a thread may be asleep.
    pub fn ring(&self) {
        self.rings.fetch_add(1, SeqCst);
        if self.waiters.load(SeqCst) > 0 {
            // Fails only for an invalid address.
            let _ = futex::wake(&self.rings, futex::Flags::empty(), i32::MAX as u32);
        }
    }

    /// Sleeps until the bell has rung since `rings` was read, or `limit` has passed (`None`: no limit). Wake-ups may be
    /// spurious, so the caller must check again.
    pub fn sleep(&self, rings: u32, limit: Option<Duration>) {
        let limit = limit.map(|limit| futex::Timespec {
            tv_sec: limit.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        });
        self.waiters.fetch_add(1, SeqCst);
        // Not private, because waiters may be in other processes. The result is ignored: the caller checks shared
        // memory whatever ended the wait.
        let _ = futex::wait(&self.rings, futex::Flags::empty(), rings, limit.as_ref());
        self.waiters.fetch_sub(1, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_before_or_during_the_sleep_ends_it() {
        let bell = Bell::default();
        let before = bell.rings();
        bell.ring();
        bell.sleep(before, None);
        std::thread::scope(|scope| {
            let seen = bell.rings();
            scope.spawn(|| bell.ring());
            while bell.rings() == seen {
                bell.sleep(seen, None);
            }
        });
        assert_eq!(bell.rings(), 2);
        assert_eq!(bell.waiters.load(SeqCst), 0);
        bell.sleep(bell.rings(), Some(Duration::from_millis(1)));
    }
}
