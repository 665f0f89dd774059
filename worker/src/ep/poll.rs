//! Polls sockets until a deadline.

use std::time::Instant;

use rustix::event::{PollFd, Timespec, poll};

/// Waits until a socket is ready; returns false if the deadline passes first.
pub(crate) fn poll_until(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> bool {
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = left.map(|left| Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        });
        match poll(fds, timeout.as_ref()) {
            Ok(0) if left.is_some_and(|left| left.is_zero()) => return false,
            // A timeout can end slightly early, so check the clock. Retry EINTR and EAGAIN.
            Ok(0) | Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            Ok(_) => return true,
            // The poll itself failed: report ready until the deadline, because reads and writes will surface any error.
            Err(_) => return left.is_none_or(|left| !left.is_zero()),
        }
    }
}
