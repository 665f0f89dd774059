//! Registration: every rank connects to rank 0, says what it is, and learns where the others are. The registering
//! connection stays as the control link.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use semmoe_tables::RankId;

use super::auth::{self, AuthError, Purpose};
use super::carrier::{self, Host as Place, TransportChoice};
use super::door::Door;
use super::error::RendezvousError;
use super::frame::{self, FrameError, MAX_HELLO_BYTES};
use super::hello::{Hello, Identity, Link, Reply};
use super::mesh;
use super::patience::{Impatience, Patience, unlimited};
use super::secret::Secret;
use crate::engine::UnitLimits;
use crate::ep::ShmMemory;

/// How long rank 0 stays after it has refused a rank, to tell those that come later.
const LINGER: Duration = Duration::from_secs(3);

/// A rank's connections: the data links by rank (none to itself).
pub(crate) struct Member<C> {
    /// Control link(s).
    pub(crate) control: C,
    /// `[world]`
    pub(crate) data: Vec<Option<TcpStream>>,
    /// What the ranks exchange through; the data links without.
    pub(crate) memory: Option<ShmMemory>,
    /// Those of the unit.
    pub(crate) limits: UnitLimits,
}

/// Rank 0 before the others have come.
#[derive(Debug)]
pub(crate) struct Host {
    listener: TcpListener,
    data: TcpListener,
}

impl Host {
    /// Listens on `address` (port 0: any) and, for data, on a free port of `data` or, without, of the same host.
    pub(crate) fn bind(address: SocketAddr, data: Option<IpAddr>) -> Result<Self, RendezvousError> {
        let listener = bind(address)?;
        let data = bind(SocketAddr::new(data.unwrap_or(address.ip()), 0))?;
        Ok(Self { listener, data })
    }

    /// Where the other ranks have to connect to.
    pub(crate) fn address(&self) -> Result<SocketAddr, RendezvousError> {
        self.listener.local_addr().map_err(|source| RendezvousError::Io { source })
    }

    /// Waits for all other ranks and connects the data links. A rank that does not belong here ends the rendezvous for
    /// all of them, each with the reason; strangers are turned away.
    pub(crate) fn gather(
        self,
        identity: &Identity,
        secret: Option<&Secret>,
        limits: UnitLimits,
        limit: Duration,
        patience: &Patience,
    ) -> Result<Member<Vec<(RankId, TcpStream)>>, RendezvousError> {
        let mut members = self.register(identity, secret, limit, patience)?;
        let kv_pages = members.iter().map(|(hello, _)| hello.kv_pages).fold(limits.kv_pages, usize::min);
        let limits = UnitLimits { kv_pages, ..limits };
        let io = |source| RendezvousError::Io { source };
        let session = fastrand::u64(..);
        let offer =
            carrier::offer(identity.transport, identity.world, limits.row_elements, session, anyone_apart(&members))?;
        let mut data = vec![self.data.local_addr().map_err(io)?];
        data.extend(members.iter().map(|(hello, _)| hello.data));
        let memory = offer.as_ref().map(|offer| offer.address);
        let welcome = Reply::Welcome { session, data, limits, memory };
        for (hello, stream) in &mut members {
            frame::write(stream, &welcome).map_err(|error| RendezvousError::BrokenOff {
                rank: RankId::new(hello.rank),
                cause: error.to_string(),
            })?;
        }
        let own = Link { session, from: 0, to: 0 };
        let lower = vec![None; usize::from(identity.world)];
        let data = mesh::connect(&self.data, own, &lower, secret, limit, patience)?;
        let control = members.into_iter().map(|(hello, stream)| (RankId::new(hello.rank), stream)).collect();
        // All others have attached before they connected.
        let memory = offer.map(|offer| offer.memory);
        Ok(Member { control, data, memory, limits })
    }

    /// The registrations of ranks 1.. in rank order.
    fn register(
        &self,
        identity: &Identity,
        secret: Option<&Secret>,
        limit: Duration,
        patience: &Patience,
    ) -> Result<Vec<(Hello, TcpStream)>, RendezvousError> {
        let mut door = Door::new(&self.listener, Purpose::Control, secret.cloned(), MAX_HELLO_BYTES);
        let mut members: Vec<Option<(Hello, TcpStream)>> = (1..identity.world).map(|_| None).collect();
        let outcome = collect(&mut door, identity, limit, patience, &mut members);
        if let Err(error) = &outcome {
            refuse_all(&mut door, error, patience, members);
            return outcome.map(|()| Vec::new());
        }
        Ok(members.into_iter().flatten().collect())
    }
}

/// Why some rank shares no memory with rank 0.
fn anyone_apart(members: &[(Hello, TcpStream)]) -> Option<String> {
    let own = Place::here();
    members.iter().find_map(|(hello, _)| carrier::apart(RankId::new(hello.rank), own.as_ref(), hello.host.as_ref()))
}

/// Waits until all have registered.
fn collect(
    door: &mut Door<'_, Hello>,
    identity: &Identity,
    limit: Duration,
    patience: &Patience,
    members: &mut [Option<(Hello, TcpStream)>],
) -> Result<(), RendezvousError> {
    while members.iter().any(Option::is_none) {
        let come = door.look(patience).map_err(|reason| match reason {
            Impatience::Io(source) => RendezvousError::Io { source },
            _ => RendezvousError::Stopped,
        })?;
        let mut come = come.into_iter();
        while let Some((hello, stream)) = come.next() {
            if let Err(error) = admit(identity, hello, stream, members) {
                // Those that came in the same moment are told with the others.
                for (hello, stream) in come {
                    if let Some(slot @ None) = members.get_mut(usize::from(hello.rank).wrapping_sub(1)) {
                        *slot = Some((hello, stream));
                    }
                }
                return Err(error);
            }
        }
        match patience.slice() {
            Ok(_) => {}
            Err(Impatience::Stopped) => return Err(RendezvousError::Stopped),
            Err(_) => {
                let missing = (1..).zip(&*members).filter(|(_, slot)| slot.is_none());
                let missing = missing.map(|(rank, _)| RankId::new(rank)).collect();
                return Err(RendezvousError::Missing { missing, limit, other_secrets: door.other_secrets() });
            }
        }
    }
    Ok(())
}

/// Tells every rank why there will be no unit: those that have registered, and for a moment those that come later.
fn refuse_all(
    door: &mut Door<'_, Hello>,
    error: &RendezvousError,
    patience: &Patience,
    members: Vec<Option<(Hello, TcpStream)>>,
) {
    let refuse = |mut stream: TcpStream| {
        // The error itself is told by rank 0; who has gone already needs no telling.
        let _ = frame::write(&mut stream, &Reply::Refused { reason: error.to_string() });
    };
    let mut absent = members.iter().filter(|slot| slot.is_none()).count();
    members.into_iter().flatten().for_each(|(_, stream)| refuse(stream));
    // Whoever was refused is one of the absent.
    if let RendezvousError::Mismatch { .. } = error {
        absent = absent.saturating_sub(1);
        let lingering = patience.at_most(LINGER);
        while absent > 0 && lingering.slice().is_ok() {
            let Ok(come) = door.look(&lingering) else { return };
            absent = absent.saturating_sub(come.len());
            come.into_iter().for_each(|(_, stream)| refuse(stream));
        }
    }
}

/// Takes a registration, or tells why not. A second process for a rank is turned away alone.
fn admit(
    identity: &Identity,
    hello: Hello,
    mut stream: TcpStream,
    members: &mut [Option<(Hello, TcpStream)>],
) -> Result<(), RendezvousError> {
    let rank = RankId::new(hello.rank);
    let mismatch = identity.difference(rank, &hello.identity).or_else(|| {
        let fits = (1..identity.world).contains(&hello.rank);
        (!fits)
            .then(|| format!("a process registered as rank {rank}, expected 1 to {}", identity.world.saturating_sub(1)))
    });
    let mismatch = mismatch.or_else(|| match identity.transport {
        TransportChoice::Shm => carrier::apart(rank, Place::here().as_ref(), hello.host.as_ref())
            .map(|why| format!("{why}: expected --transport auto or tcp")),
        TransportChoice::Auto | TransportChoice::Tcp => None,
    });
    if let Some(reason) = mismatch {
        // Told on this side as well, whether or not the other still listens.
        let _ = frame::write(&mut stream, &Reply::Refused { reason: reason.clone() });
        return Err(RendezvousError::Mismatch { reason });
    }
    let slot = &mut members[rank.index() - 1];
    if slot.is_some() {
        let reason = format!("rank {rank} has registered already");
        tracing::warn!("{reason}: turned away a second process");
        let _ = frame::write(&mut stream, &Reply::Refused { reason });
        return Ok(());
    }
    unlimited(&stream).map_err(|source| RendezvousError::Io { source })?;
    *slot = Some((hello, stream));
    Ok(())
}

/// Registers with rank 0 at `address` and connects the data links, which it takes on `data` or, without, on the address from
/// which it reached rank 0.
pub(crate) fn join(
    (address, data): (SocketAddr, Option<IpAddr>),
    (rank, identity, kv_pages): (RankId, &Identity, usize),
    secret: Option<&Secret>,
    limit: Duration,
    patience: &Patience,
) -> Result<Member<TcpStream>, RendezvousError> {
    let unreachable = |cause: String| RendezvousError::Unreachable { address, limit, cause };
    let io = |source| RendezvousError::Io { source };
    let mut control = patience.connect(address).map_err(|reason| match reason {
        Impatience::Stopped => RendezvousError::Stopped,
        Impatience::Deadline => unreachable("nothing listens there".into()),
        Impatience::Io(error) => unreachable(error.to_string()),
    })?;
    auth::connect(&mut control, Purpose::Control, secret, patience).map_err(|error| match patience.slice() {
        Err(Impatience::Stopped) => RendezvousError::Stopped,
        _ => distrust(RankId::new(0), &error),
    })?;
    let own_ip = data.unwrap_or(control.local_addr().map_err(io)?.ip());
    let listener = bind(SocketAddr::new(own_ip, 0))?;
    let (data, host) = (listener.local_addr().map_err(io)?, Place::here());
    let hello = Hello { rank: rank.get(), data, kv_pages, host, identity: identity.clone() };
    let broken = |error: FrameError| match patience.slice() {
        Err(Impatience::Stopped) => RendezvousError::Stopped,
        _ => RendezvousError::BrokenOff { rank: RankId::new(0), cause: error.to_string() },
    };
    frame::write(&mut control, &hello).map_err(broken)?;
    let reply = frame::read::<Reply>(&mut patience.reader(&control), MAX_HELLO_BYTES).map_err(broken)?;
    let (session, addresses, limits, memory) = match reply {
        Reply::Refused { reason } => return Err(RendezvousError::Mismatch { reason }),
        Reply::Welcome { session, data, limits, memory } => (session, data, limits, memory),
    };
    if addresses.len() != usize::from(identity.world) {
        let cause = format!("it named {} ranks, expected {}", addresses.len(), identity.world);
        return Err(RendezvousError::BrokenOff { rank: RankId::new(0), cause });
    }
    let memory = memory.map(|address| address.open(identity.world, limits.row_elements, session)).transpose()?;
    let lower: Vec<Option<SocketAddr>> = (0..identity.world)
        .zip(addresses)
        .map(|(peer, data)| (peer < rank.get()).then(|| reachable(data, address.ip())))
        .collect();
    let own = Link { session, from: rank.get(), to: rank.get() };
    let data = mesh::connect(&listener, own, &lower, secret, limit, patience)?;
    unlimited(&control).map_err(io)?;
    Ok(Member { control, data, memory, limits })
}

/// What a failed handshake with a rank means for this one.
pub(super) fn distrust(rank: RankId, error: &AuthError) -> RendezvousError {
    match error {
        error if error.is_secret() => {
            RendezvousError::Mismatch { reason: format!("rank {rank} is not trusted: {error}") }
        }
        AuthError::Protocol { .. } => {
            RendezvousError::Mismatch { reason: format!("rank {rank} does not fit: {error}") }
        }
        error => RendezvousError::BrokenOff { rank, cause: error.to_string() },
    }
}

/// A rank that listens on every address is reached where rank 0 was.
fn reachable(address: SocketAddr, rank_0: IpAddr) -> SocketAddr {
    if address.ip().is_unspecified() { SocketAddr::new(rank_0, address.port()) } else { address }
}

fn bind(address: SocketAddr) -> Result<TcpListener, RendezvousError> {
    let listen = || -> io::Result<TcpListener> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    listen().map_err(|source| RendezvousError::Bind { address, source })
}
