//! Ranks as processes: one connected TCP stream for each pair, read and written at the same time, so that messages larger
//! than the socket buffers cannot block each other.
//!
//! When a rank dies, every other rank sees its stream end; but a rank that only sees the *next* one leave must not blame that
//! one. So a rank that gives up first tells its peers which rank failed and why, and a rank that finds a closed or silent
//! peer listens for a moment whether another knows better.

mod frame;
mod peer;

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use semmoe_tables::RankId;

use super::transport::{Transport, TransportError, Wake, Waker};
use peer::{Fault, Peer, Progress};

/// How long a rank that found a failure listens for an earlier cause, and how long it tries to tell its own.
const SETTLE: Duration = Duration::from_millis(150);

/// One rank's streams to all others.
pub struct TcpTransport {
    rank: RankId,
    /// `[P]`: `None` in the own slot.
    peers: Vec<Option<Peer>>,
    /// Collectives begun.
    collective: u64,
    limit: Duration,
    bell: Bell,
    failed: Option<TransportError>,
}

/// Which rank is at fault and how it was noticed.
type RankFault = (usize, Cause);

enum Cause {
    Fault(Fault),
    Late,
}

impl TcpTransport {
    /// Takes over streams that are connected already, `peers[p]` to rank p; `limit` bounds one collective, which includes the
    /// time by which a slower rank arrives later.
    ///
    /// # Errors
    /// A peer without a stream, a stream in the own slot, or a stream whose options cannot be set.
    pub fn new(rank: RankId, peers: Vec<Option<TcpStream>>, limit: Duration) -> io::Result<Self> {
        for (peer, stream) in peers.iter().enumerate() {
            if stream.is_some() == (peer == rank.index()) {
                let detail = format!("rank {rank} needs a stream for each other rank: slot {peer} is not right");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
            }
        }
        if rank.index() >= peers.len() {
            let detail = format!("rank {rank} is not below the world size {}", peers.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
        }
        let peers = peers.into_iter().map(|stream| stream.map(Peer::new).transpose()).collect::<io::Result<_>>()?;
        Ok(Self { rank, peers, collective: 0, limit, bell: Bell::new()?, failed: None })
    }

    /// Sends and receives with all peers until all are done.
    fn exchange(&mut self, outgoing: &[Vec<u8>], incoming: &mut [Vec<u8>]) -> Result<(), RankFault> {
        self.collective += 1;
        // A limit too large to add is none.
        let deadline = Instant::now().checked_add(self.limit);
        for (peer, message) in self.peers.iter_mut().zip(outgoing) {
            if let Some(peer) = peer {
                peer.begin_send(self.collective, message.len());
            }
        }
        let mut pending: Vec<Pending> = self.peers.iter().map(|peer| Pending::new(peer.is_some())).collect();
        loop {
            for (rank, pending) in pending.iter_mut().enumerate().filter(|(_, pending)| pending.ready) {
                let Some(peer) = &mut self.peers[rank] else { continue };
                pending
                    .advance(peer, self.collective, &outgoing[rank], &mut incoming[rank])
                    .map_err(|fault| (rank, Cause::Fault(fault)))?;
            }
            let Some(late) = pending.iter().position(Pending::is_open) else {
                return Ok(());
            };
            if !self.poll_peers(&mut pending, deadline) {
                return Err((late, Cause::Late));
            }
        }
    }

    /// Sleeps until a peer is ready for something that is wanted of it; false = the time is up.
    fn poll_peers(&self, pending: &mut [Pending], deadline: Option<Instant>) -> bool {
        let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(pending.len());
        for (peer, pending) in self.peers.iter().zip(&mut *pending) {
            pending.ready = false;
            if let Some(peer) = peer.as_ref().filter(|_| !pending.interest().is_empty()) {
                fds.push(PollFd::new(peer.stream(), pending.interest()));
            }
        }
        let in_time = poll_until(&mut fds, deadline);
        let wanted = pending.iter_mut().filter(|pending| !pending.interest().is_empty());
        for (pending, fd) in wanted.zip(&fds) {
            pending.ready = !fd.revents().is_empty();
        }
        in_time
    }

    fn wait_for_wake(&mut self) -> Result<Wake, RankFault> {
        loop {
            for (rank, peer) in self.peers.iter_mut().enumerate() {
                let Some(peer) = peer else { continue };
                if peer.has_message().map_err(|fault| (rank, Cause::Fault(fault)))? {
                    return Ok(Wake::Peer);
                }
            }
            let mut fds = vec![PollFd::new(&self.bell.listener, PollFlags::IN)];
            fds.extend(self.peers.iter().flatten().map(|peer| PollFd::new(peer.stream(), PollFlags::IN)));
            poll_until(&mut fds, None);
            if !fds[0].revents().is_empty() {
                self.bell.silence();
                return Ok(Wake::Local);
            }
        }
    }

    /// Decides which rank failed first, remembers it, and tells the peers. `outgoing` is what was being sent.
    fn fail(&mut self, (rank, cause): RankFault, outgoing: &[Vec<u8>]) -> TransportError {
        let told = match &cause {
            // The rank itself says whose failure it was.
            Cause::Fault(Fault::Failure { .. }) => None,
            Cause::Fault(Fault::Protocol(_)) => None,
            Cause::Fault(Fault::Closed(_)) | Cause::Late => self.listen_for_cause(rank),
        };
        let at = |rank: usize| RankId::new(rank as u16);
        let error = match (told, cause) {
            (Some((rank, cause)), _) | (None, Cause::Fault(Fault::Failure { rank, cause })) => {
                TransportError::lost(RankId::new(rank), cause)
            }
            (None, Cause::Fault(Fault::Closed(cause))) => TransportError::lost(at(rank), cause),
            (None, Cause::Fault(Fault::Protocol(detail))) => TransportError::protocol(at(rank), detail),
            (None, Cause::Late) => TransportError::TimedOut { rank: at(rank), limit: self.limit },
        };
        self.failed = Some(error.clone());
        self.tell(&error, outgoing);
        error
    }

    /// Listens to the other peers for a failure that one of them knows of, for a bounded moment.
    fn listen_for_cause(&mut self, suspect: usize) -> Option<(u16, String)> {
        let deadline = Instant::now() + SETTLE;
        let listen = |peer: &Option<Peer>| Pending { watching: peer.is_some(), ..Pending::new(false) };
        let mut pending: Vec<Pending> = self.peers.iter().map(listen).collect();
        loop {
            for (peer, pending) in self.peers.iter_mut().zip(&mut pending) {
                let Some(peer) = peer.as_mut().filter(|_| pending.watching) else { continue };
                match peer.search_failure() {
                    Some(Fault::Failure { rank, cause }) => return Some((rank, cause)),
                    Some(Fault::Closed(_) | Fault::Protocol(_)) => pending.watching = false,
                    None => {}
                }
            }
            // If nobody is left who could tell, there is nothing to wait for.
            let others = pending.iter().enumerate().any(|(rank, pending)| rank != suspect && pending.watching);
            if !others || !self.poll_peers(&mut pending, Some(deadline)) {
                return None;
            }
        }
    }

    /// Tells every peer why this rank gives up: after the message that is on the wire to it, if that can still be finished.
    fn tell(&mut self, error: &TransportError, outgoing: &[Vec<u8>]) {
        let deadline = Instant::now() + SETTLE;
        let cause = match error {
            TransportError::PeerLost { cause, .. } => cause.clone(),
            TransportError::TimedOut { limit, .. } => format!("it did not answer within {} ms", limit.as_millis()),
            TransportError::Protocol { detail, .. } => format!("it broke the protocol: {detail}"),
        };
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            let Some(peer) = peer else { continue };
            let message = outgoing.get(rank).map_or(&[][..], Vec::as_slice);
            while peer.is_mid_send(message.len()) && peer.send(message) == Ok(Progress::Pending) {
                let mut fds = [PollFd::new(peer.stream(), PollFlags::OUT)];
                if !poll_until(&mut fds, Some(deadline)) {
                    break;
                }
            }
            if !peer.is_mid_send(message.len()) {
                peer.send_failure(error.rank().get(), &cause);
            }
        }
    }
}

/// What is still wanted of one peer in one collective.
struct Pending {
    sending: bool,
    receiving: bool,
    /// All was received; what may come is the next collective's message, or word of a failure elsewhere.
    watching: bool,
    /// Worth trying: nothing was tried yet, or the stream is ready.
    ready: bool,
}

impl Pending {
    fn new(is_peer: bool) -> Self {
        Self { sending: is_peer, receiving: is_peer, watching: false, ready: true }
    }

    /// Whether the collective is not complete without this peer.
    fn is_open(&self) -> bool {
        self.sending || self.receiving
    }

    fn interest(&self) -> PollFlags {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::OUT, self.sending);
        flags.set(PollFlags::IN, self.receiving || self.watching);
        flags
    }

    /// Goes on with one peer in both directions.
    fn advance(
        &mut self,
        peer: &mut Peer,
        collective: u64,
        outgoing: &[u8],
        incoming: &mut Vec<u8>,
    ) -> Result<(), Fault> {
        if self.sending && peer.send(outgoing)? == Progress::Done {
            self.sending = false;
        }
        if self.receiving {
            if peer.receive(collective, incoming)? == Progress::Done {
                (self.receiving, self.watching) = (false, true);
            }
        } else if self.watching {
            match peer.has_message() {
                Ok(waits) => self.watching = !waits,
                // It gave all that this collective needs; the next one will miss it.
                Err(Fault::Closed(_)) => self.watching = false,
                Err(fault) => return Err(fault),
            }
        }
        Ok(())
    }
}

/// False = the time is up and nothing is ready.
fn poll_until(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> bool {
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
            // Nothing was polled: reading and writing will tell more, until the time is up.
            Err(_) => return left.is_none_or(|left| !left.is_zero()),
        }
    }
}

impl Transport for TcpTransport {
    fn rank(&self) -> RankId {
        self.rank
    }

    fn world(&self) -> usize {
        self.peers.len()
    }

    fn all_to_all(&mut self, outgoing: &[Vec<u8>], incoming: &mut [Vec<u8>]) -> Result<(), TransportError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.exchange(outgoing, incoming).map_err(|fault| self.fail(fault, outgoing))
    }

    fn wait(&mut self) -> Result<Wake, TransportError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.wait_for_wake().map_err(|fault| self.fail(fault, &[]))
    }

    fn waker(&self) -> Waker {
        self.bell.waker()
    }
}

/// A pair of connected sockets: what can be polled together with the peers.
struct Bell {
    listener: UnixStream,
    ringer: Arc<UnixStream>,
}

impl Bell {
    fn new() -> io::Result<Self> {
        let (listener, ringer) = UnixStream::pair()?;
        listener.set_nonblocking(true)?;
        ringer.set_nonblocking(true)?;
        Ok(Self { listener, ringer: Arc::new(ringer) })
    }

    fn waker(&self) -> Waker {
        let ringer = Arc::clone(&self.ringer);
        // A full socket has rung already; a closed one has nobody to wake.
        Waker::new(move || drop((&*ringer).write(&[1])))
    }

    fn silence(&mut self) {
        let mut rings = [0; 64];
        while matches!(self.listener.read(&mut rings), Ok(count) if count > 0) {}
    }
}
