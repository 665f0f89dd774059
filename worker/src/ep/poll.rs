//! Waiting for sockets until a moment.

use std::time::Instant;

use rustix::event::{PollFd, Timespec, poll};

/// False = the time is up and nothing is ready.
pub(crate) fn poll_until(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> bool {
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = left.map(|left| Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        });
        match poll(fds, timeout.as_ref()) {
            Ok(0) if left.is_some_and(|left| left.is_zero()) => return false,
            // A timeout can end a little early: look at the clock again. EINTR and EAGAIN: once more.
            Ok(0) | Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            Ok(_) => return true,
            // Nothing was polled: reading and writing will show more, until the time is up.
            Err(_) => return left.is_none_or(|left| !left.is_zero()),
        }
    }
}
