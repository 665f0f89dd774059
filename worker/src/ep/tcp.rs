//! Streams over TCP, for ranks on several hosts.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::poll::poll_until;
use super::stream::{ByteStream, Medium, Peer, Pending, StreamTransport};
use semmoe_kernels::collectives::Waker;

use super::links::check_links;

/// One rank's transport over connected TCP streams.
pub type TcpTransport = StreamTransport<Sockets>;

impl TcpTransport {
    /// Takes ownership of connected streams, where `peers[p]` connects to rank p. `limit` bounds one collective,
    /// including the wait for slower ranks.
    ///
    /// # Errors
    /// A peer has no stream, this rank's own slot has one, or a socket option cannot be set.
    pub fn new(rank: usize, peers: Vec<Option<TcpStream>>, limit: Duration) -> io::Result<Self> {
        check_links(rank, &peers)?;
        for stream in peers.iter().flatten() {
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
        }
        let (bell, ringer) = UnixStream::pair()?;
        bell.set_nonblocking(true)?;
        ringer.set_nonblocking(true)?;
        Ok(Self::over(rank, peers, Sockets { bell, ringer: Arc::new(ringer) }, limit))
    }
}

impl ByteStream for TcpStream {
    /// Reading ahead lets several small messages share one system call.
    const READ_AHEAD: bool = true;

    fn finish(&mut self) {
        let _closed_already = self.shutdown(Shutdown::Write);
    }
}

/// Polls the sockets of one rank.
#[derive(Debug)]
pub struct Sockets {
    /// Becomes readable when `ringer` is written to, so that wakers can be polled together with the peers.
    bell: UnixStream,
    ringer: Arc<UnixStream>,
}

fn interest(pending: &Pending) -> PollFlags {
    let mut flags = PollFlags::empty();
    flags.set(PollFlags::OUT, pending.sending);
    flags.set(PollFlags::IN, pending.receiving || pending.watching);
    flags
}

impl Medium for Sockets {
    type Stream = TcpStream;

    fn poll(
        &mut self,
        peers: &[Option<Peer<TcpStream>>],
        pending: &mut [Pending],
        bell: bool,
        deadline: Option<Instant>,
    ) -> bool {
        let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(pending.len() + 1);
        for (peer, pending) in peers.iter().zip(&mut *pending) {
            pending.ready = false;
            if let Some(peer) = peer.as_ref().filter(|_| !interest(pending).is_empty()) {
                fds.push(PollFd::new(&peer.stream, interest(pending)));
            }
        }
        if bell {
            fds.push(PollFd::new(&self.bell, PollFlags::IN));
        }
        let in_time = poll_until(&mut fds, deadline);
        let wanted = pending.iter_mut().filter(|pending| !interest(pending).is_empty());
        for (pending, fd) in wanted.zip(&fds) {
            pending.ready = !fd.revents().is_empty();
        }
        in_time
    }

    fn take_ring(&mut self) -> bool {
        let (mut rings, mut rang) = ([0; 64], false);
        while matches!(self.bell.read(&mut rings), Ok(count) if count > 0) {
            rang = true;
        }
        rang
    }

    fn waker(&self) -> Waker {
        let ringer = Arc::clone(&self.ringer);
        // Errors do not matter: a full socket has already rung, and a closed one has no reader to wake.
        Waker::new(move || drop((&*ringer).write(&[1])))
    }
}
