//! Incoming connections: each one authenticates and sends its first message on its own thread, so that a silent or slow
//! client does not delay the others. If too many connections are pending, the oldest is dropped, because a real rank
//! responds immediately.

use std::collections::BTreeMap;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use semmoe_tables::RankId;
use serde::de::DeserializeOwned;

use super::auth::{self, AuthError, Purpose};
use super::error::RendezvousError;
use super::frame;
use super::patience::{Impatience, Patience};
use super::secret::Secret;

/// Time limit for authentication and the first message.
const HELLO_LIMIT: Duration = Duration::from_secs(10);
/// Maximum number of pending connections, which bounds the resources that unauthenticated clients can use.
const MAX_PENDING: usize = 256;
/// Maximum duration of one poll.
const POLL: Duration = Duration::from_millis(20);

/// A connection whose first message has arrived or failed.
struct Arrival<T> {
    number: u64,
    words: Result<T, AuthError>,
    stream: TcpStream,
}

/// A connection whose first message is pending.
struct Pending {
    stream: TcpStream,
    proven: Arc<AtomicBool>,
}

/// Accepts incoming connections. `T` is the type of a connection's first message.
pub(super) struct Acceptor<'a, T> {
    listener: &'a TcpListener,
    purpose: Purpose,
    secret: Option<Secret>,
    /// Size limit of the first message.
    limit: usize,
    sender: mpsc::Sender<Arrival<T>>,
    arrivals: mpsc::Receiver<Arrival<T>>,
    /// Pending connections by number, in order of arrival.
    pending: BTreeMap<u64, Pending>,
    next: u64,
    other_secrets: usize,
}

impl<'a, T: DeserializeOwned + Send + 'static> Acceptor<'a, T> {
    pub(super) fn new(listener: &'a TcpListener, purpose: Purpose, secret: Option<Secret>, limit: usize) -> Self {
        let (sender, arrivals) = mpsc::channel();
        Self { listener, purpose, secret, limit, sender, arrivals, pending: BTreeMap::new(), next: 0, other_secrets: 0 }
    }

    /// Accepts connections, which `take` assigns to `slots`, until all slots are filled. The first slot is for rank
    /// `first`.
    pub(super) fn gather<S>(
        &mut self,
        slots: &mut [Option<S>],
        first: u16,
        mut take: impl FnMut(&mut [Option<S>], Vec<(T, TcpStream)>) -> Result<(), RendezvousError>,
        patience: &Patience,
    ) -> Result<(), RendezvousError> {
        while slots.iter().any(Option::is_none) {
            let come = self.poll(patience)?;
            take(slots, come)?;
            match patience.slice() {
                Ok(_) => {}
                Err(Impatience::Stopped) => return Err(RendezvousError::Stopped),
                Err(_) => {
                    let empty = (first..).zip(&*slots).filter(|(_, slot)| slot.is_none());
                    let missing: Vec<RankId> = empty.map(|(rank, _)| RankId::new(rank)).collect();
                    // The last rank may have arrived just in time.
                    if !missing.is_empty() {
                        let (limit, other_secrets) = (patience.limit, self.other_secrets);
                        return Err(RendezvousError::Missing { missing, limit, other_secrets });
                    }
                }
            }
        }
        Ok(())
    }

    /// Waits briefly for a connection, then returns the connections whose first message has arrived. Fails if the
    /// listener fails or the process is stopping.
    pub(super) fn poll(&mut self, patience: &Patience) -> Result<Vec<(T, TcpStream)>, RendezvousError> {
        match patience.at_most(POLL).accept(self.listener) {
            Ok(stream) => self.listen_to(stream, patience.at_most(HELLO_LIMIT)),
            Err(Impatience::Deadline) => {}
            Err(Impatience::Stopped) => return Err(RendezvousError::Stopped),
            Err(Impatience::Io(error)) if self.make_room() => {
                tracing::warn!(%error, "cannot accept a connection: dropping an unauthenticated one");
            }
            Err(Impatience::Io(error)) => return Err(error.into()),
        }
        let mut come = Vec::new();
        while let Ok(Arrival { number, words, stream }) = self.arrivals.try_recv() {
            self.pending.remove(&number);
            match words {
                Ok(words) => come.push((words, stream)),
                Err(error) => {
                    self.other_secrets += usize::from(error.is_secret());
                    tracing::warn!(%error, "rejected a connection");
                }
            }
        }
        Ok(come)
    }

    fn listen_to(&mut self, mut stream: TcpStream, patience: Patience) {
        if self.pending.len() >= MAX_PENDING {
            self.make_room();
        }
        let own = match stream.try_clone() {
            Ok(own) => own,
            Err(error) => {
                tracing::warn!(%error, "rejected a connection");
                return;
            }
        };
        let (sender, secret) = (self.sender.clone(), self.secret.clone());
        let (purpose, limit, number) = (self.purpose, self.limit, self.next);
        let proven = Arc::<AtomicBool>::default();
        self.next += 1;
        self.pending.insert(number, Pending { stream: own, proven: Arc::clone(&proven) });
        let started = std::thread::Builder::new().spawn(move || {
            let words = auth::accept(&mut stream, purpose, secret.as_ref(), &patience).and_then(|()| {
                proven.store(true, Ordering::Relaxed);
                Ok(frame::read::<T>(&mut patience.reader(&stream), limit)?)
            });
            // The receiver may be gone.
            let _ = sender.send(Arrival { number, words, stream });
        });
        if let Err(error) = started {
            self.pending.remove(&number);
            tracing::warn!(%error, "rejected a connection");
        }
    }

    /// Drops the oldest unauthenticated connection, or else the oldest connection; returns false if there is none. The
    /// connection's thread detects this immediately.
    fn make_room(&mut self) -> bool {
        let stranger = self.pending.iter().find(|(_, pending)| !pending.proven.load(Ordering::Relaxed));
        let number = stranger.or_else(|| self.pending.iter().next()).map(|(number, _)| *number);
        let Some(pending) = number.and_then(|number| self.pending.remove(&number)) else { return false };
        // A connection that has already ended also frees a slot.
        let _ = pending.stream.shutdown(Shutdown::Both);
        true
    }
}
