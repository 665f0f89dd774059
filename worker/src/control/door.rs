//! Incoming connections: each proves itself and sends its first message on a thread of its own, so that a silent or
//! slow stranger delays no other.

use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;
use std::time::Duration;

use semmoe_tables::RankId;
use serde::de::DeserializeOwned;

use super::auth::{self, AuthError, Purpose};
use super::error::RendezvousError;
use super::frame;
use super::patience::{Impatience, Patience};
use super::secret::Secret;

/// How long a connection may take to authenticate and to introduce itself.
const HELLO_LIMIT: Duration = Duration::from_secs(10);
/// Connections that may be pending at a time: a bound on the resources of strangers.
const MAX_PENDING: usize = 256;
/// How long one look at the door takes at most.
const LOOK: Duration = Duration::from_millis(20);

type Arrival<T> = (Result<T, AuthError>, TcpStream);

/// See the module. `T` is the first message of a connection.
pub(super) struct Door<'a, T> {
    listener: &'a TcpListener,
    purpose: Purpose,
    secret: Option<Secret>,
    /// Bytes of the first words at most.
    limit: usize,
    sender: mpsc::Sender<Arrival<T>>,
    arrivals: mpsc::Receiver<Arrival<T>>,
    pending: usize,
    other_secrets: usize,
}

impl<'a, T: DeserializeOwned + Send + 'static> Door<'a, T> {
    pub(super) fn new(listener: &'a TcpListener, purpose: Purpose, secret: Option<Secret>, limit: usize) -> Self {
        let (sender, arrivals) = mpsc::channel();
        Self { listener, purpose, secret, limit, sender, arrivals, pending: 0, other_secrets: 0 }
    }

    /// Lets connections in, by `take` into `slots`, until all are filled. The first slot belongs to rank `first`.
    pub(super) fn gather<S>(
        &mut self,
        slots: &mut [Option<S>],
        first: u16,
        mut take: impl FnMut(&mut [Option<S>], Vec<(T, TcpStream)>) -> Result<(), RendezvousError>,
        patience: &Patience,
    ) -> Result<(), RendezvousError> {
        while slots.iter().any(Option::is_none) {
            let come = self.look(patience)?;
            take(slots, come)?;
            match patience.slice() {
                Ok(_) => {}
                Err(Impatience::Stopped) => return Err(RendezvousError::Stopped),
                Err(_) => {
                    let empty = (first..).zip(&*slots).filter(|(_, slot)| slot.is_none());
                    let missing: Vec<RankId> = empty.map(|(rank, _)| RankId::new(rank)).collect();
                    // Complete at the last moment: fine.
                    if !missing.is_empty() {
                        let (limit, other_secrets) = (patience.limit, self.other_secrets);
                        return Err(RendezvousError::Missing { missing, limit, other_secrets });
                    }
                }
            }
        }
        Ok(())
    }

    /// The connections so far, waiting a moment for the next. A listener that fails or a process that is to stop is an
    /// error.
    pub(super) fn look(&mut self, patience: &Patience) -> Result<Vec<(T, TcpStream)>, RendezvousError> {
        match patience.at_most(LOOK).accept(self.listener) {
            Ok(stream) if self.pending < MAX_PENDING => self.listen_to(stream, patience.at_most(HELLO_LIMIT)),
            Ok(_) | Err(Impatience::Deadline) => {}
            Err(Impatience::Stopped) => return Err(RendezvousError::Stopped),
            Err(Impatience::Io(error)) => return Err(error.into()),
        }
        let mut come = Vec::new();
        while let Ok((words, stream)) = self.arrivals.try_recv() {
            self.pending -= 1;
            match words {
                Ok(words) => come.push((words, stream)),
                Err(error) => {
                    self.other_secrets += usize::from(error.is_secret());
                    tracing::warn!(%error, "turned away a connection");
                }
            }
        }
        Ok(come)
    }

    fn listen_to(&mut self, mut stream: TcpStream, patience: Patience) {
        let (sender, secret) = (self.sender.clone(), self.secret.clone());
        let (purpose, limit) = (self.purpose, self.limit);
        self.pending += 1;
        std::thread::spawn(move || {
            let words = auth::accept(&mut stream, purpose, secret.as_ref(), &patience)
                .and_then(|()| Ok(frame::read::<T>(&mut patience.reader(&stream), limit)?));
            // The connection may be gone already.
            let _ = sender.send((words, stream));
        });
    }
}
