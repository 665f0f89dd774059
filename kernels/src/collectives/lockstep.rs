//! Messages and barriers between the ranks of one unit.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use super::rows::INLINE_RANKS;

/// Maximum bytes that one rank may send to another in one collective.
pub const MAX_MESSAGE_BYTES: usize = 1 << 30;

/// One rank's end of a unit that runs in lockstep: any two ranks make the same number of exchanges with each other,
/// among all ranks or some. Groups of ranks may therefore proceed independently as long as they exchange nothing with
/// others.
///
/// Lockstep needs no coordinator. A rank with work starts a step; its first message wakes the others from
/// [`Lockstep::wait`], and they join with whatever work they have, possibly none. Every step has the same number of
/// collectives. An end that failed stays failed and keeps reporting the rank that failed first.
pub trait Lockstep: Send {
    /// This rank.
    fn rank(&self) -> usize;

    /// P: ranks in the unit, including this one.
    fn world(&self) -> usize;

    /// Sends `outgoing[p]` to every peer p and fills `incoming[p]` with the bytes that p sent in the same collective.
    /// This rank's slot is neither read nor written. Both slices have one buffer per rank; the buffers of `incoming`
    /// are reused. On return, every rank has entered this collective, and everything it wrote to shared memory before
    /// that is visible here.
    ///
    /// # Errors
    /// Identifies the rank that was lost, was late, or broke the protocol; the first such cause is kept and reported to
    /// the peers.
    fn all_to_all(&mut self, outgoing: &[Vec<u8>], incoming: &mut [Vec<u8>]) -> Result<(), UnitError> {
        let peers: SmallVec<[usize; INLINE_RANKS]> = (0..self.world()).collect();
        self.group_all_to_all(Exchange { peers: &peers, outgoing, incoming, arrived: &mut |_| () })
    }

    /// Exchanges messages among some ranks only, each of which lists this rank as a peer. Counts as one exchange with
    /// each of them and waits only for them: other groups run theirs concurrently.
    ///
    /// # Errors
    /// See [`Lockstep::all_to_all`].
    fn group_all_to_all(&mut self, exchange: Exchange<'_>) -> Result<(), UnitError>;

    /// Sleeps until a [`Waker`] of this rank rings or a peer has started its next step, without a time limit.
    ///
    /// # Errors
    /// If a peer disappears during the wait, which is detected at once.
    fn wait(&mut self) -> Result<Wake, UnitError>;

    /// Returns a handle with which other threads of this process end [`Lockstep::wait`].
    fn waker(&self) -> Waker;
}

/// Implements [`Lockstep`](crate::collectives::Lockstep) by delegation: `[generics] type, end => the delegate`.
#[macro_export]
macro_rules! lockstep_through {
    ([$($generics:tt)*] $type:ty, $end:ident => $other:expr) => {
        impl<$($generics)*> $crate::collectives::Lockstep for $type {
            fn rank(&self) -> usize {
                let $end = self;
                ($other).rank()
            }

            fn world(&self) -> usize {
                let $end = self;
                ($other).world()
            }

            fn group_all_to_all(
                &mut self,
                exchange: $crate::collectives::Exchange<'_>,
            ) -> Result<(), $crate::collectives::UnitError> {
                let $end = self;
                ($other).group_all_to_all(exchange)
            }

            fn wait(&mut self) -> Result<$crate::collectives::Wake, $crate::collectives::UnitError> {
                let $end = self;
                ($other).wait()
            }

            fn waker(&self) -> $crate::collectives::Waker {
                let $end = self;
                ($other).waker()
            }
        }
    };
}

lockstep_through!([L: Lockstep + ?Sized] Box<L>, end => **end);
lockstep_through!([L: Lockstep + ?Sized] &mut L, end => **end);

/// One exchange with some ranks. All slices are in the order of `peers`.
pub struct Exchange<'a> {
    /// Distinct ranks. If this rank is among them, its slots are neither read nor written.
    pub peers: &'a [usize],
    /// `outgoing[i]` is sent to `peers[i]`.
    pub outgoing: &'a [Vec<u8>],
    /// `incoming[i]` is filled with the bytes that `peers[i]` sent.
    pub incoming: &'a mut [Vec<u8>],
    /// Called with i as soon as the complete message of `peers[i]` has arrived.
    pub arrived: &'a mut dyn FnMut(usize),
}

/// Why [`Lockstep::wait`] returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wake {
    /// A [`Waker`] of this rank rang; all rings since the last wake-up count as one.
    Local,
    /// A peer has started its next step and needs this rank to join.
    Peer,
}

/// Ends another thread's [`Lockstep::wait`]. A ring is cheap, never blocks, and is not lost if it precedes the wait.
#[derive(Clone)]
pub struct Waker(Arc<dyn Fn() + Send + Sync>);

impl Waker {
    /// A waker that calls `ring`.
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

/// A rank of the unit failed; the unit cannot continue.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum UnitError {
    /// The rank disappeared.
    #[error("rank {rank} was lost: {cause}")]
    PeerLost {
        /// The first rank that disappeared.
        rank: usize,
        /// How the loss was detected.
        cause: String,
    },
    /// The rank is connected but did not join a collective in time.
    #[error("rank {rank} did not answer within {} ms", limit.as_millis())]
    TimedOut {
        /// The rank that was late.
        rank: usize,
        /// Time limit of a collective.
        limit: Duration,
    },
    /// The rank sent an invalid message.
    #[error("rank {rank} broke the protocol: {detail}")]
    Protocol {
        /// The rank that sent the message.
        rank: usize,
        /// Actual and expected value.
        detail: String,
    },
    /// This rank's operands do not fit its memory or do not match each other; the other ranks cannot continue without
    /// it.
    #[error("rank {rank}: {detail}")]
    Operands {
        /// This rank.
        rank: usize,
        /// Actual and expected value.
        detail: String,
    },
}

impl UnitError {
    /// Returns the rank that failed first, as far as this rank knows.
    pub fn rank(&self) -> usize {
        match self {
            Self::PeerLost { rank, .. }
            | Self::TimedOut { rank, .. }
            | Self::Protocol { rank, .. }
            | Self::Operands { rank, .. } => *rank,
        }
    }

    /// Checks the number of elements of an operand.
    ///
    /// # Errors
    /// If the numbers differ; the error states both.
    pub fn check(rank: usize, what: &str, found: usize, expected: usize) -> Result<(), Self> {
        let detail = || format!("{what}: {found} elements, expected {expected}");
        if found == expected { Ok(()) } else { Err(Self::Operands { rank, detail: detail() }) }
    }

    /// Returns the error for a rank that disappeared.
    pub fn lost(rank: usize, cause: impl Into<String>) -> Self {
        let cause = cause.into();
        Self::PeerLost { rank, cause }
    }

    /// Returns the error for a rank that broke the protocol.
    pub fn protocol(rank: usize, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        Self::Protocol { rank, detail }
    }
}

/// Converts an error to [`UnitError::protocol`].
pub(super) fn protocol<E: fmt::Display>(rank: usize) -> impl FnOnce(E) -> UnitError {
    move |error| UnitError::protocol(rank, error.to_string())
}
