//! The transport between rank processes: one byte stream per pair of ranks. Reads and writes are interleaved, so that
//! messages larger than a stream's buffer cannot deadlock. A [`Medium`] carries the streams: sockets or shared memory.
//!
//! When a rank dies, its peers see their streams close and stop too, which closes further streams; those peers must not
//! be blamed. So a stopping rank first reports to its peers which rank failed and why, and a rank that finds a closed
//! or silent peer waits briefly for such a report.

mod frame;
mod peer;

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use semmoe_kernels::collectives::{Exchange, Lockstep, UnitError, Wake, Waker};

pub(super) use peer::Peer;
use peer::{Fault, Progress};

/// How long a rank that detected a failure waits for reports of an earlier one, and how long it tries to send its own.
const SETTLE: Duration = Duration::from_millis(150);

/// A byte stream to and from one peer. Reads and writes transfer as much as they can and return `WouldBlock` instead of
/// blocking. A read of 0 bytes is the end of the stream; `InvalidData` means a protocol violation.
pub trait ByteStream: Read + Write + Send {
    /// Whether reads are expensive enough that reading ahead pays off.
    const READ_AHEAD: bool;

    /// Ends the writing side.
    fn finish(&mut self);
}

/// The medium that carries one rank's streams.
pub trait Medium: Send {
    /// A stream to one peer.
    type Stream: ByteStream;

    /// Sleeps until a requested operation on a peer may be possible, and sets that peer's `ready`; with `bell`, also
    /// wakes when the waker rings. Returns false if `deadline` has passed (`None`: no limit).
    fn poll(
        &mut self,
        peers: &[Option<Peer<Self::Stream>>],
        pending: &mut [Pending],
        bell: bool,
        deadline: Option<Instant>,
    ) -> bool;

    /// Whether the waker has rung since the last call.
    fn take_ring(&mut self) -> bool;

    /// Returns a handle that rings the bell.
    fn waker(&self) -> Waker;
}

/// One rank's streams to all other ranks.
pub struct StreamTransport<M: Medium> {
    rank: usize,
    /// `[P]`: `None` for this rank.
    peers: Vec<Option<Peer<M::Stream>>>,
    medium: M,
    /// `[P]`: outstanding work in the current collective.
    pending: Vec<Pending>,
    limit: Duration,
    failed: Option<UnitError>,
}

/// The rank at fault, and how the fault was detected.
struct RankFault {
    rank: usize,
    fault: Fault,
}

impl<M: Medium> StreamTransport<M> {
    /// Creates a transport over `streams[p]` to each rank p, with `None` for this rank.
    pub(super) fn over(rank: usize, streams: Vec<Option<M::Stream>>, medium: M, limit: Duration) -> Self {
        let peers: Vec<_> = streams.into_iter().map(|stream| stream.map(Peer::new)).collect();
        let pending = vec![Pending::default(); peers.len()];
        Self { rank, peers, medium, pending, limit, failed: None }
    }

    #[cfg(test)]
    pub(super) fn medium(&self) -> &M {
        &self.medium
    }

    /// Sends to and receives from the given peers until all of them are done.
    fn exchange(&mut self, exchange: Exchange<'_>) -> Result<(), RankFault> {
        let Exchange { peers, outgoing, incoming, arrived } = exchange;
        self.pending.fill(Pending::default());
        for (&rank, message) in peers.iter().zip(outgoing) {
            if let Some(peer) = &mut self.peers[rank] {
                self.pending[rank] = Pending::new(true);
                peer.begin(message.len());
            }
        }
        // A limit too large to add to the clock means no limit.
        let deadline = Instant::now().checked_add(self.limit);
        loop {
            for (i, &rank) in peers.iter().enumerate() {
                let pending = &mut self.pending[rank];
                let Some(peer) = self.peers[rank].as_mut().filter(|_| pending.ready) else { continue };
                let was_receiving = pending.receiving;
                pending.advance(peer, &outgoing[i], &mut incoming[i]).map_err(|fault| RankFault { rank, fault })?;
                if was_receiving && !pending.receiving {
                    arrived(i);
                }
            }
            let Some(late) = self.pending.iter().position(Pending::is_open) else {
                return Ok(());
            };
            if !self.medium.poll(&self.peers, &mut self.pending, false, deadline) {
                return Err(RankFault { rank: late, fault: Fault::Late });
            }
        }
    }

    fn wait_for_wake(&mut self) -> Result<Wake, RankFault> {
        self.watch();
        loop {
            for (rank, _) in self.pending.iter().enumerate().filter(|(_, pending)| pending.ready) {
                let Some(peer) = &mut self.peers[rank] else { continue };
                if peer.has_message().map_err(|fault| RankFault { rank, fault })? {
                    return Ok(Wake::Peer);
                }
            }
            if self.medium.take_ring() {
                return Ok(Wake::Local);
            }
            self.medium.poll(&self.peers, &mut self.pending, true, None);
        }
    }

    /// From now on, watches for a message or a failure report from any peer.
    fn watch(&mut self) {
        for (pending, peer) in self.pending.iter_mut().zip(&self.peers) {
            *pending = Pending { watching: peer.is_some(), ..Pending::new(false) };
        }
    }

    /// Determines which rank failed first, stores the error, and reports it to the peers. `sending` contains the
    /// messages of the failed exchange.
    fn fail(&mut self, at: RankFault, sending: Sending<'_>) -> UnitError {
        let RankFault { rank, fault } = at;
        let kind = match fault {
            // The peer reported which rank failed, or is itself at fault.
            Fault::Failure { .. } | Fault::Protocol(_) => None,
            Fault::Closed(_) | Fault::Late => self.listen_for_cause(rank),
        };
        let error = match (kind, fault) {
            (Some((rank, cause)), _) | (None, Fault::Failure { rank, cause }) => UnitError::lost(rank.into(), cause),
            (None, Fault::Closed(cause)) => UnitError::lost(rank, cause),
            (None, Fault::Protocol(detail)) => UnitError::protocol(rank, detail),
            (None, Fault::Late) => UnitError::TimedOut { rank, limit: self.limit },
        };
        self.failed = Some(error.clone());
        self.report_failure(&error, sending);
        error
    }

    /// Waits briefly for another peer to report an earlier failure.
    fn listen_for_cause(&mut self, suspect: usize) -> Option<(u16, String)> {
        let deadline = Instant::now() + SETTLE;
        self.watch();
        loop {
            for (peer, pending) in self.peers.iter_mut().zip(&mut self.pending) {
                let Some(peer) = peer.as_mut().filter(|_| pending.watching) else { continue };
                match peer.search_failure() {
                    Some(Fault::Failure { rank, cause }) => return Some((rank, cause)),
                    Some(Fault::Closed(_) | Fault::Protocol(_) | Fault::Late) => pending.watching = false,
                    None => {}
                }
            }
            // Once no other peer can report a cause, there is nothing to wait for.
            let others = self.pending.iter().enumerate().any(|(rank, pending)| rank != suspect && pending.watching);
            if !others || !self.medium.poll(&self.peers, &mut self.pending, false, Some(deadline)) {
                return None;
            }
        }
    }

    /// Reports to every peer why this rank gives up, first completing a partly sent message if possible.
    fn report_failure(&mut self, error: &UnitError, sending: Sending<'_>) {
        let deadline = Instant::now() + SETTLE;
        let cause = match error {
            UnitError::PeerLost { cause, .. } => cause.clone(),
            UnitError::TimedOut { limit, .. } => format!("it did not answer within {} ms", limit.as_millis()),
            UnitError::Protocol { detail, .. } => format!("it broke the protocol: {detail}"),
            UnitError::Operands { detail, .. } => detail.clone(),
        };
        for rank in 0..self.peers.len() {
            let message = sending.to(rank);
            self.finish_message(rank, message, deadline);
            if let Some(peer) = self.peers[rank].as_mut().filter(|peer| !peer.is_mid_send(message.len())) {
                peer.send_failure(error.rank() as u16, &cause);
            }
        }
    }

    /// Sends the rest of a partly sent message, as much as its receiver accepts before the deadline.
    fn finish_message(&mut self, rank: usize, message: &[u8], deadline: Instant) {
        self.pending.fill(Pending::default());
        self.pending[rank].sending = true;
        loop {
            let Some(peer) = self.peers[rank].as_mut().filter(|peer| peer.is_mid_send(message.len())) else { return };
            if peer.send(message) != Ok(Progress::Pending)
                || !self.medium.poll(&self.peers, &mut self.pending, false, Some(deadline))
            {
                return;
            }
        }
    }
}

/// The messages of an exchange, in the order of its peers.
#[derive(Clone, Copy, Default)]
struct Sending<'a> {
    peers: &'a [usize],
    outgoing: &'a [Vec<u8>],
}

impl<'a> Sending<'a> {
    fn to(self, rank: usize) -> &'a [u8] {
        self.peers.iter().position(|&peer| peer == rank).map_or(&[], |i| &self.outgoing[i])
    }
}

/// The outstanding work with one peer in one collective.
#[derive(Clone, Copy, Default, Debug)]
pub struct Pending {
    pub(super) sending: bool,
    pub(super) receiving: bool,
    /// The message has arrived in full; the next collective's message or a failure report may follow.
    pub(super) watching: bool,
    /// Whether to try the stream: not tried yet, or ready.
    pub(super) ready: bool,
}

impl Pending {
    fn new(is_peer: bool) -> Self {
        Self { sending: is_peer, receiving: is_peer, watching: false, ready: true }
    }

    /// Whether the collective still needs this peer.
    fn is_open(&self) -> bool {
        self.sending || self.receiving
    }

    /// Makes progress with one peer in both directions.
    fn advance(
        &mut self,
        peer: &mut Peer<impl ByteStream>,
        outgoing: &[u8],
        incoming: &mut Vec<u8>,
    ) -> Result<(), Fault> {
        if self.sending && peer.send(outgoing)? == Progress::Done {
            self.sending = false;
        }
        if self.receiving {
            if peer.receive(incoming)? == Progress::Done {
                (self.receiving, self.watching) = (false, true);
            }
        } else if self.watching {
            match peer.has_message() {
                Ok(waits) => self.watching = !waits,
                // The peer has sent its whole message for this collective; the next one will report the closed
                // connection.
                Err(Fault::Closed(_)) => self.watching = false,
                Err(fault) => return Err(fault),
            }
        }
        Ok(())
    }
}

impl<M: Medium> Lockstep for StreamTransport<M> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.peers.len()
    }

    fn group_all_to_all(&mut self, exchange: Exchange<'_>) -> Result<(), UnitError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let sending = Sending { peers: exchange.peers, outgoing: exchange.outgoing };
        self.exchange(exchange).map_err(|fault| self.fail(fault, sending))
    }

    fn wait(&mut self) -> Result<Wake, UnitError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.wait_for_wake().map_err(|fault| self.fail(fault, Sending::default()))
    }

    fn waker(&self) -> Waker {
        self.medium.waker()
    }
}

/// The header of a message.
#[cfg(test)]
pub(super) fn data_header(collective: u64, length: usize) -> [u8; 24] {
    frame::Header::Data { collective, length }.encode()
}
