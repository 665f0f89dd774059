//! What carries bytes between the ranks of one unit: one collective, one way to sleep, one way to be woken.
//!
//! Lockstep needs no coordinator. A rank with work begins a step, its first message wakes the others out of
//! [`Transport::wait`], and they join with whatever they have, an empty step included; every step makes the same number of
//! collectives. A transport that failed stays failed and goes on naming the rank that failed first.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use semmoe_tables::RankId;

/// The most bytes one rank may send another in one collective.
pub const MAX_MESSAGE_BYTES: usize = 1 << 30;

/// One rank's end of the mesh. All ranks call [`Transport::all_to_all`] equally often.
pub trait Transport: Send {
    /// This rank.
    fn rank(&self) -> RankId;

    /// Ranks in the unit, this one included.
    fn world(&self) -> usize;

    /// Sends `outgoing[p]` to every peer p and fills `incoming[p]` with what p sent in the same collective. The own slot is
    /// neither read nor written: what a rank keeps for itself is not carried. Both slices have one buffer per rank; the
    /// buffers of `incoming` are reused.
    ///
    /// # Errors
    /// Names the rank that was lost, was late, or broke the protocol; the first such cause is kept and told to the peers.
    fn all_to_all(&mut self, outgoing: &[Vec<u8>], incoming: &mut [Vec<u8>]) -> Result<(), TransportError>;

    /// Sleeps until a [`Waker`] of this rank rang or a peer has begun its next step, without a time limit.
    ///
    /// # Errors
    /// A peer that goes away meanwhile is noticed at once.
    fn wait(&mut self) -> Result<Wake, TransportError>;

    /// A handle by which other threads of this process end [`Transport::wait`].
    fn waker(&self) -> Waker;
}

/// A rank needs one link to each other rank, `links[p]` to rank p, and none to itself.
pub(super) fn check_links<T>(rank: RankId, links: &[Option<T>]) -> io::Result<()> {
    let invalid = |detail: String| Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
    for (peer, link) in links.iter().enumerate() {
        if link.is_some() == (peer == rank.index()) {
            return invalid(format!("rank {rank} needs a stream for each other rank: slot {peer} is not right"));
        }
    }
    if rank.index() >= links.len() {
        return invalid(format!("rank {rank} is not below the world size {}", links.len()));
    }
    Ok(())
}

/// Why [`Transport::wait`] returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wake {
    /// A [`Waker`] of this rank rang; any number of rings since the last wake count as one.
    Local,
    /// A peer has begun its next step and needs this rank in it.
    Peer,
}

/// Ends another thread's [`Transport::wait`]: cheap, never blocks, and a ring before the wait is not lost.
#[derive(Clone)]
pub struct Waker(Arc<dyn Fn() + Send + Sync>);

impl Waker {
    /// A waker that does `ring`.
    pub fn new(ring: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(ring))
    }

    /// Wakes the rank.
    pub fn ring(&self) {
        (self.0)();
    }
}

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Waker")
    }
}

/// A rank of the unit failed; the unit cannot go on.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TransportError {
    /// The rank went away.
    #[error("rank {rank} was lost: {cause}")]
    PeerLost {
        /// The rank that went first.
        rank: RankId,
        /// How it was noticed.
        cause: String,
    },
    /// The rank is connected but did not take part in a collective.
    #[error("rank {rank} did not answer within {} ms", limit.as_millis())]
    TimedOut {
        /// The rank that was waited for.
        rank: RankId,
        /// The limit of one collective.
        limit: Duration,
    },
    /// The rank sent what no rank of this unit would send.
    #[error("rank {rank} broke the protocol: {detail}")]
    Protocol {
        /// The rank that sent it.
        rank: RankId,
        /// What was found and what was expected.
        detail: String,
    },
}

impl TransportError {
    /// The rank that failed first, as far as this rank knows.
    #[must_use]
    pub fn rank(&self) -> RankId {
        match self {
            Self::PeerLost { rank, .. } | Self::TimedOut { rank, .. } | Self::Protocol { rank, .. } => *rank,
        }
    }

    pub(crate) fn lost(rank: RankId, cause: impl Into<String>) -> Self {
        let cause = cause.into();
        Self::PeerLost { rank, cause }
    }

    pub(crate) fn protocol(rank: RankId, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        Self::Protocol { rank, detail }
    }
}
