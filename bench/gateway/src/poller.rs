//! Readiness of many sockets on one thread, by edge-triggered epoll for its low overhead.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::error::BenchError;

/// Most sockets reported by one wait.
const EVENTS_PER_TURN: usize = 256;

/// Watches sockets by a key.
pub(crate) struct Poller {
    epoll: OwnedFd,
    events: Vec<epoll::Event>,
}

impl Poller {
    pub(crate) fn new() -> Result<Self, BenchError> {
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(|error| BenchError::io("epoll")(error.into()))?;
        Ok(Self { epoll, events: Vec::with_capacity(EVENTS_PER_TURN) })
    }

    /// Reports whenever a socket becomes readable or writable, or is closed. Closing the socket removes it.
    pub(crate) fn add(&self, socket: impl AsFd, key: u64) -> Result<(), BenchError> {
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(&self.epoll, socket, EventData::new_u64(key), flags)
            .map_err(|error| BenchError::io("epoll add")(error.into()))
    }

    /// The keys of ready sockets, after at most `limit`; `None` waits forever.
    pub(crate) fn wait(&mut self, limit: Option<Duration>, ready: &mut Vec<u64>) -> Result<(), BenchError> {
        ready.clear();
        let fail = |error: rustix::io::Errno| BenchError::io("epoll wait")(error.into());
        // epoll_wait counts in milliseconds; ppoll on the epoll descriptor counts in nanoseconds.
        let sleeps = limit.is_some_and(|limit| !limit.is_zero());
        if let Some(limit) = limit.filter(|_| sleeps) {
            let limit = Timespec { tv_sec: limit.as_secs().min(3600) as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
            match poll(&mut [PollFd::new(&self.epoll, PollFlags::IN)], Some(&limit)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(()),
                Ok(_) => {}
                Err(error) => return Err(fail(error)),
            }
        }
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        self.events.clear();
        let room = rustix::buffer::spare_capacity(&mut self.events);
        match epoll::wait(&self.epoll, room, limit.is_some().then_some(&now)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(fail(error)),
        }
        ready.extend(self.events.iter().map(|event| event.data.u64()));
        Ok(())
    }
}
