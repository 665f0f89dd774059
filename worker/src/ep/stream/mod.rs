//! Ranks as processes: one byte stream between every two of them, read and written at the same time, so that messages
//! larger than what a stream holds cannot block each other. What carries the streams is a [`Medium`]: sockets, or
//! shared memory.
//!
//! When a rank dies, every other rank sees its stream end; but a rank that only sees the *next* one leave must not
//! blame that one. So a rank that stops first reports to its peers which rank failed and why, and a rank that finds a
//! closed or silent peer listens for a moment whether another knows better.

mod frame;
mod peer;

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use semmoe_kernels::collectives::{Exchange, Lockstep, UnitError, Wake, Waker};

pub(super) use peer::Peer;
use peer::{Fault, Progress};

/// How long a rank that found a failure listens for an earlier cause, and how long it tries to send its own.
const SETTLE: Duration = Duration::from_millis(150);

/// Bytes to and from one peer. Reads and writes take what they can and never block (`WouldBlock`); a read of 0 bytes is
/// the end; `InvalidData` is what no rank would send.
pub trait ByteStream: Read + Write + Send {
    /// Whether each read costs so much that more should be read than is needed.
    const READ_AHEAD: bool;

    /// Nothing more will be written.
    fn finish(&mut self);
}

/// The carrier of one rank's streams.
pub trait Medium: Send {
    /// A stream to one peer.
    type Stream: ByteStream;

    /// Sleeps until something that is wanted of a peer may be possible, and says so in `ready`; with `bell`, until the
    /// waker rang as well. False = `deadline` has passed (none: no limit).
    fn poll(
        &mut self,
        peers: &[Option<Peer<Self::Stream>>],
        pending: &mut [Pending],
        bell: bool,
        deadline: Option<Instant>,
    ) -> bool;

    /// Whether the waker rang since this was asked last.
    fn take_ring(&mut self) -> bool;

    /// Rings.
    fn waker(&self) -> Waker;
}

/// One rank's streams to all others.
pub struct StreamTransport<M: Medium> {
    rank: usize,
    /// `[P]`: `None` in the own slot.
    peers: Vec<Option<Peer<M::Stream>>>,
    medium: M,
    /// `[P]`: of the current collective.
    pending: Vec<Pending>,
    /// Collectives begun.
    collective: u64,
    limit: Duration,
    failed: Option<UnitError>,
}

/// Which rank is at fault and how it was noticed.
struct RankFault {
    rank: usize,
    fault: Fault,
}

impl<M: Medium> StreamTransport<M> {
    /// `streams[p]` goes to rank p, none in the own slot.
    pub(super) fn over(rank: usize, streams: Vec<Option<M::Stream>>, medium: M, limit: Duration) -> Self {
        let peers: Vec<_> = streams.into_iter().map(|stream| stream.map(Peer::new)).collect();
        let pending = vec![Pending::default(); peers.len()];
        Self { rank, peers, medium, pending, collective: 0, limit, failed: None }
    }

    #[cfg(test)]
    pub(super) fn medium(&self) -> &M {
        &self.medium
    }

    /// Sends and receives with the peers named until all are done.
    fn exchange(&mut self, exchange: Exchange<'_>) -> Result<(), RankFault> {
        let Exchange { peers, outgoing, incoming, arrived } = exchange;
        self.collective += 1;
        self.pending.fill(Pending::default());
        for (&rank, message) in peers.iter().zip(outgoing) {
            if let Some(peer) = &mut self.peers[rank] {
                self.pending[rank] = Pending::new(true);
                peer.begin_send(self.collective, message.len());
            }
        }
        // A limit too large to add is no limit.
        let deadline = Instant::now().checked_add(self.limit);
        loop {
            for (i, &rank) in peers.iter().enumerate() {
                let pending = &mut self.pending[rank];
                let Some(peer) = self.peers[rank].as_mut().filter(|_| pending.ready) else { continue };
                let was_receiving = pending.receiving;
                pending
                    .advance(peer, self.collective, &outgoing[i], &mut incoming[i])
                    .map_err(|fault| RankFault { rank, fault })?;
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

    /// From now on, whatever any peer sends is wanted.
    fn watch(&mut self) {
        for (pending, peer) in self.pending.iter_mut().zip(&self.peers) {
            *pending = Pending { watching: peer.is_some(), ..Pending::new(false) };
        }
    }

    /// Decides which rank failed first, remembers it, and reports it to the peers. `sending` holds the unsent messages.
    fn fail(&mut self, at: RankFault, sending: Sending<'_>) -> UnitError {
        let RankFault { rank, fault } = at;
        let kind = match fault {
            // The rank itself says whose failure it was.
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

    /// Listens to the other peers for a failure that one of them knows of, for a bounded moment.
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
            // If no peer is left that could know, there is nothing to wait for.
            let others = self.pending.iter().enumerate().any(|(rank, pending)| rank != suspect && pending.watching);
            if !others || !self.medium.poll(&self.peers, &mut self.pending, false, Some(deadline)) {
                return None;
            }
        }
    }

    /// Sends every peer why this rank gives up: after the message that is on the wire to it, if that can still be
    /// finished.
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

    /// Sends the rest of a message that is on the wire in part, as far as its receiver takes it in time.
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
    /// All was received; the next collective's message may come, or word of a failure elsewhere.
    pub(super) watching: bool,
    /// Worth trying: nothing was tried yet, or the stream is ready.
    pub(super) ready: bool,
}

impl Pending {
    fn new(is_peer: bool) -> Self {
        Self { sending: is_peer, receiving: is_peer, watching: false, ready: true }
    }

    /// Whether the collective is not complete without this peer.
    fn is_open(&self) -> bool {
        self.sending || self.receiving
    }

    /// Goes on with one peer in both directions.
    fn advance(
        &mut self,
        peer: &mut Peer<impl ByteStream>,
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
