//! Registration: every rank connects to rank 0, registers itself, and receives the other ranks' addresses. The
//! connection becomes the control link.

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use semmoe_tables::RankId;

use super::acceptor::Acceptor;
use super::auth::{self, AuthError, Purpose, Unproven};
use super::carrier::{self, Host as Place, MemoryTerms, SharedMemory, Sharing, TransportChoice};
use super::error::RendezvousError;
use super::frame::{self, FrameError, MAX_HELLO_BYTES};
use super::hello::{Hello, Identity, Link, Reply, Welcome};
use super::mesh;
use super::patience::{Impatience, Patience, listen, unlimited};
use super::secret::Secret;
use crate::engine::{KvPages, UnitLimits};

/// Appended if ranks that map each other's GPU memory are on several hosts.
const ONE_HOST: &str = "ranks on GPUs map each other's memory, which is not supported between hosts (NVLink domains, \
     InfiniBand) or containers";
/// How long rank 0 keeps listening after it has rejected a rank, to notify ranks that connect later.
const LINGER: Duration = Duration::from_secs(3);

/// A rank that has joined the unit.
pub(crate) struct Joined<C> {
    /// The control link, or rank 0's links.
    pub(crate) control: C,
    pub(crate) ends: Ends,
    /// The limits of the unit.
    pub(crate) limits: UnitLimits,
}

/// A rank's connections to the others.
pub(crate) struct Ends {
    /// `[world]`: the data links; `None` for this rank.
    pub(crate) data: Vec<Option<TcpStream>>,
    /// Memory shared with other ranks of this host, if any; otherwise the data links carry all data.
    pub(crate) memory: Option<SharedMemory>,
}

/// Addresses for the rendezvous.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Location<'a> {
    /// Rank 0's address; port 0 means any free port.
    pub(crate) rendezvous: SocketAddr,
    /// The address for this rank's data links, if it differs from the one used to reach rank 0.
    pub(crate) data: Option<IpAddr>,
    /// Ranks with different places do not share memory.
    pub(crate) place: Option<&'a str>,
}

/// Rank 0 before the other ranks have registered.
#[derive(Debug)]
pub(crate) struct Host {
    listener: TcpListener,
    data: TcpListener,
    place: Option<Place>,
}

impl Host {
    /// Binds the listener.
    pub(crate) fn bind(location: Location<'_>) -> Result<Self, RendezvousError> {
        let Location { rendezvous, data, place } = location;
        let listener = bind(rendezvous)?;
        let data = bind(SocketAddr::new(data.unwrap_or(rendezvous.ip()), 0))?;
        Ok(Self { listener, data, place: Place::here(place) })
    }

    /// Returns the address that other ranks must connect to.
    pub(crate) fn address(&self) -> Result<SocketAddr, RendezvousError> {
        Ok(self.listener.local_addr()?)
    }

    /// Waits for all other ranks and connects the data links. A mismatched rank ends the rendezvous, and all ranks
    /// receive the reason; unauthenticated clients are rejected.
    pub(crate) fn gather(
        self,
        identity: &Identity,
        secret: Option<&Secret>,
        limits: UnitLimits,
        patience: &Patience,
    ) -> Result<Joined<Vec<(RankId, TcpStream)>>, RendezvousError> {
        let mut members = self.register(identity, secret, patience)?;
        let kv_pages = members.iter().map(|(hello, _)| hello.kv_pages).fold(limits.kv_pages, KvPages::min);
        let limits = UnitLimits { kv_pages, ..limits };
        let session = fastrand::u64(..);
        let mut hosts = vec![self.place.clone()];
        hosts.extend(members.iter().map(|(hello, _)| hello.host.clone()));
        let leaders = carrier::host_leaders(identity.transport, &hosts);
        let mut data = vec![self.data.local_addr()?];
        data.extend(members.iter().map(|(hello, _)| hello.data));
        let welcome = Reply::Welcome(Welcome { session, data, limits, leaders: leaders.clone() });
        for (hello, stream) in &mut members {
            frame::write(stream, &welcome)
                .map_err(|error| RendezvousError::broken_off(RankId::new(hello.rank), error))?;
        }
        let own = Link { session, from: 0, to: 0 };
        let lower = vec![None; usize::from(identity.world)];
        let data = mesh::connect(&self.data, own, &lower, secret, patience)?;
        let control = members.into_iter().map(|(hello, stream)| (RankId::new(hello.rank), stream)).collect();
        let terms = MemoryTerms { choice: identity.transport, session, elements: limits.row_elements };
        let memory = Sharing { rank: RankId::new(0), links: &data, terms, patience }.share(&leaders)?;
        Ok(Joined { control, ends: Ends { data, memory }, limits })
    }

    /// Collects the registrations of ranks 1 and higher, in rank order.
    fn register(
        &self,
        identity: &Identity,
        secret: Option<&Secret>,
        patience: &Patience,
    ) -> Result<Vec<(Hello, TcpStream)>, RendezvousError> {
        let mut acceptor = Acceptor::new(&self.listener, Purpose::Control, secret.cloned(), MAX_HELLO_BYTES);
        let mut members: Vec<Slot> = (1..identity.world).map(|_| None).collect();
        let take = |members: &mut [Slot], come: Vec<(Hello, TcpStream)>| {
            let mut come = come.into_iter();
            while let Some((hello, stream)) = come.next() {
                if let Err(error) = self.admit(identity, hello, stream, members) {
                    // Connections that arrived at the same time receive the same reply.
                    for (hello, stream) in come {
                        if let Some(slot @ None) = members.get_mut(usize::from(hello.rank).wrapping_sub(1)) {
                            *slot = Some((hello, stream));
                        }
                    }
                    return Err(error);
                }
            }
            Ok(())
        };
        if let Err(error) = acceptor.gather(&mut members, 1, take, patience) {
            refuse_all(&mut acceptor, &error, patience, members);
            return Err(error);
        }
        Ok(members.into_iter().flatten().collect())
    }

    /// Accepts a registration, or replies with the reason for rejecting it. A second process for a rank is rejected
    /// without ending the rendezvous.
    fn admit(
        &self,
        identity: &Identity,
        hello: Hello,
        mut stream: TcpStream,
        members: &mut [Slot],
    ) -> Result<(), RendezvousError> {
        let rank = RankId::new(hello.rank);
        let misplaced = || {
            let expected = format!("1 to {}", identity.world.saturating_sub(1));
            let fits = (1..identity.world).contains(&hello.rank);
            (!fits).then(|| format!("a process registered as rank {rank}, expected {expected}"))
        };
        let apart = || {
            let expected = match identity.transport {
                _ if identity.one_host => ONE_HOST,
                TransportChoice::Shm => "expected --transport auto or tcp",
                TransportChoice::Auto | TransportChoice::Tcp => return None,
            };
            let why = carrier::apart(rank, self.place.as_ref(), hello.host.as_ref())?;
            Some(format!("{why}: {expected}"))
        };
        let mismatch = identity.difference(rank, &hello.identity).or_else(misplaced).or_else(apart);
        if let Some(reason) = mismatch {
            // Best effort: this side reports the error as well.
            let _ = frame::write(&mut stream, &Reply::Refusal(reason.clone()));
            return Err(RendezvousError::Mismatch(reason));
        }
        let slot = &mut members[rank.index() - 1];
        if slot.is_some() {
            let reason = format!("rank {rank} has already registered");
            tracing::warn!("{reason}: rejected a second process");
            let _ = frame::write(&mut stream, &Reply::Refusal(reason));
            return Ok(());
        }
        unlimited(&stream)?;
        *slot = Some((hello, stream));
        Ok(())
    }
}

/// A rank's registration, once received.
type Slot = Option<(Hello, TcpStream)>;

/// Notifies every rank of the reason that the unit cannot form: the registered ranks, and for a while also ranks that
/// connect later.
fn refuse_all(acceptor: &mut Acceptor<'_, Hello>, error: &RendezvousError, patience: &Patience, members: Vec<Slot>) {
    let refuse = |mut stream: TcpStream| {
        // Best effort: rank 0 reports the error itself.
        let _ = frame::write(&mut stream, &Reply::Refusal(error.to_string()));
    };
    let mut absent = members.iter().filter(|slot| slot.is_none()).count();
    members.into_iter().flatten().for_each(|(_, stream)| refuse(stream));
    // The rejected rank is not registered, but has already received its reply.
    if let RendezvousError::Mismatch(_) = error {
        absent = absent.saturating_sub(1);
        let lingering = patience.at_most(LINGER);
        while absent > 0 && lingering.slice().is_ok() {
            let Ok(come) = acceptor.poll(&lingering) else { return };
            absent = absent.saturating_sub(come.len());
            come.into_iter().for_each(|(_, stream)| refuse(stream));
        }
    }
}

/// Registers with rank 0 and connects the data links.
pub(crate) fn join(
    location: Location<'_>,
    rank: RankId,
    identity: &Identity,
    kv_pages: KvPages,
    secret: Option<&Secret>,
    patience: &Patience,
) -> Result<Joined<TcpStream>, RendezvousError> {
    let Location { rendezvous: address, data, place } = location;
    let rank_0 = RankId::new(0);
    let unreachable = |source| RendezvousError::Unreachable { address, limit: patience.limit, source };
    let unless_stopped = |error| match patience.slice() {
        Err(Impatience::Stopped) => RendezvousError::Stopped,
        _ => error,
    };
    let mut control = auth::reach(address, Purpose::Control, secret, patience).map_err(|cause| match cause {
        Unproven::Unreachable(reason) => reason.or("nothing listens there", unreachable),
        Unproven::Refused(error) => unless_stopped(distrust(rank_0, &error)),
    })?;
    let own_ip = data.unwrap_or(control.local_addr()?.ip());
    let listener = bind(SocketAddr::new(own_ip, 0))?;
    let (data, host) = (listener.local_addr()?, Place::here(place));
    let hello = Hello { rank: rank.get(), data, kv_pages, host, identity: identity.clone() };
    let broken = |error: FrameError| unless_stopped(RendezvousError::broken_off(rank_0, error));
    frame::write(&mut control, &hello).map_err(broken)?;
    let reply = frame::read::<Reply>(&mut patience.reader(&control), MAX_HELLO_BYTES).map_err(broken)?;
    let Welcome { session, data: addresses, limits, leaders } = match reply {
        Reply::Welcome(welcome) => welcome,
        Reply::Refusal(reason) => return Err(RendezvousError::Mismatch(reason)),
    };
    let world = usize::from(identity.world);
    if addresses.len() != world || leaders.len() != world {
        let cause =
            format!("it sent {} addresses and {} leaders, expected {world} each", addresses.len(), leaders.len());
        return Err(RendezvousError::broken_off(rank_0, cause));
    }
    let lower: Vec<Option<SocketAddr>> = (0..identity.world)
        .zip(addresses)
        .map(|(peer, data)| (peer < rank.get()).then(|| reachable(data, address.ip())))
        .collect();
    let own = Link { session, from: rank.get(), to: rank.get() };
    let data = mesh::connect(&listener, own, &lower, secret, patience)?;
    let terms = MemoryTerms { choice: identity.transport, session, elements: limits.row_elements };
    let memory = Sharing { rank, links: &data, terms, patience }.share(&leaders)?;
    unlimited(&control)?;
    Ok(Joined { control, ends: Ends { data, memory }, limits })
}

/// Creates the error for a failed handshake with a rank.
pub(super) fn distrust(rank: RankId, error: &AuthError) -> RendezvousError {
    let mismatch = |what: &str| RendezvousError::Mismatch(format!("rank {rank} {what}: {error}"));
    match error {
        error if error.is_secret() => mismatch("is not trusted"),
        AuthError::Protocol { .. } => mismatch("does not fit"),
        error => RendezvousError::broken_off(rank, error.to_string()),
    }
}

/// Replaces the unspecified address of a rank that listens on all interfaces with the address used to reach rank 0.
fn reachable(address: SocketAddr, rank_0: IpAddr) -> SocketAddr {
    if address.ip().is_unspecified() { SocketAddr::new(rank_0, address.port()) } else { address }
}

fn bind(address: SocketAddr) -> Result<TcpListener, RendezvousError> {
    listen(address).map_err(|source| RendezvousError::Bind { address, source })
}
