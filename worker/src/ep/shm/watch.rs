//! Detects dead ranks by an idle connection to each rank, which closes when the rank's process ends.

use std::io::{self, Read as _};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags};

use super::memory::ShmMemory;
use crate::ep::poll::poll_until;

/// The connection to one rank, and how it ended, if it has.
#[derive(Debug)]
pub(super) struct Life {
    link: TcpStream,
    end: OnceLock<End>,
}

/// Kind and cause of the error that reads and writes return once the connection has ended.
type End = (io::ErrorKind, String);

impl Life {
    pub(super) fn new(link: TcpStream) -> io::Result<Self> {
        link.set_nonblocking(true)?;
        Ok(Self { link, end: OnceLock::new() })
    }

    /// Returns the error for reads and writes once the rank has died.
    pub(super) fn end(&self) -> Option<io::Error> {
        let (kind, cause) = self.end.get()?;
        Some(io::Error::new(*kind, cause.clone()))
    }

    /// Closes this rank's side of the connection, so that the other rank regards it as dead.
    pub(super) fn finish(&self) {
        let _closed_already = self.link.shutdown(Shutdown::Write);
    }

    /// Returns how the connection ended, if it did.
    fn check(&self) -> Option<End> {
        match (&self.link).read(&mut [0; 64]) {
            Ok(0) => Some((io::ErrorKind::BrokenPipe, "it closed its connection".to_owned())),
            Ok(_) => Some((io::ErrorKind::InvalidData, "unexpected bytes on an idle connection".to_owned())),
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => None,
            Err(error) => Some((io::ErrorKind::BrokenPipe, error.to_string())),
        }
    }
}

/// The thread that watches all connections and rings the rank's own bell when one ends. Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct Watch {
    /// `None` while dropping.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub(super) fn start(rank: usize, lives: Vec<Arc<Life>>, memory: Arc<ShmMemory>) -> io::Result<Self> {
        let (stop, stopped) = UnixStream::pair()?;
        let watch = move || watch(lives, &stopped, || memory.bell(rank).ring());
        let thread = std::thread::Builder::new().name(format!("rank-{rank}-watch")).spawn(watch)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The thread only polls; if it panicked, the panic has already been reported.
            let _ = thread.join();
        }
    }
}

fn watch(mut lives: Vec<Arc<Life>>, stopped: &UnixStream, ring: impl Fn()) {
    loop {
        let mut fds = vec![PollFd::new(stopped, PollFlags::IN)];
        fds.extend(lives.iter().map(|life| PollFd::new(&life.link, PollFlags::IN)));
        poll_until(&mut fds, None);
        if !fds[0].revents().is_empty() {
            return;
        }
        drop(fds);
        lives.retain(|life| match life.check() {
            None => true,
            Some(end) => {
                // Only this thread sets the value, and only once.
                let _ = life.end.set(end);
                ring();
                false
            }
        });
    }
}
