//! Registration: every rank connects to rank 0, says what it is, and learns where the others are. The registering
//! connection stays as the control link.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::time::Duration;

use semmoe_tables::RankId;

use super::error::RendezvousError;
use super::frame::{self, MAX_HELLO_BYTES};
use super::hello::{Hello, Identity, Link, MAGIC, PROTOCOL, Reply};
use super::mesh;
use super::patience::{Impatience, Patience, unlimited};

/// How long a connection may take to say who it is.
const HELLO_LIMIT: Duration = Duration::from_secs(10);
/// Registrations being read at a time: a bound on what strangers can occupy.
const MAX_PENDING: usize = 256;

/// A rank's connections: the data links by rank (none to itself).
pub(crate) struct Member<C> {
    /// Control link(s).
    pub(crate) control: C,
    /// `[world]`
    pub(crate) data: Vec<Option<TcpStream>>,
}

/// Rank 0 before the others have come.
#[derive(Debug)]
pub(crate) struct Host {
    listener: TcpListener,
    data: TcpListener,
}

impl Host {
    /// Listens on `address` (port 0: any) and, for data, on another port of the same host.
    pub(crate) fn bind(address: SocketAddr) -> Result<Self, RendezvousError> {
        let listener = bind(address)?;
        let data = bind(SocketAddr::new(address.ip(), 0))?;
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
        limit: Duration,
        patience: &Patience,
    ) -> Result<Member<Vec<(RankId, TcpStream)>>, RendezvousError> {
        let mut members = self.register(identity, limit, patience)?;
        let io = |source| RendezvousError::Io { source };
        let session = fastrand::u64(..);
        let mut data = vec![self.data.local_addr().map_err(io)?];
        data.extend(members.iter().map(|(hello, _)| hello.data));
        let welcome = Reply::Welcome { session, data };
        for (hello, stream) in &mut members {
            frame::write(stream, &welcome).map_err(|error| RendezvousError::BrokenOff {
                rank: RankId::new(hello.rank),
                cause: error.to_string(),
            })?;
        }
        let own = Link { session, from: 0, to: 0 };
        let data = mesh::connect(&self.data, own, &vec![None; usize::from(identity.world)], limit, patience)?;
        let control = members.into_iter().map(|(hello, stream)| (RankId::new(hello.rank), stream)).collect();
        Ok(Member { control, data })
    }

    /// The registrations of ranks 1.. in rank order.
    fn register(
        &self,
        identity: &Identity,
        limit: Duration,
        patience: &Patience,
    ) -> Result<Vec<(Hello, TcpStream)>, RendezvousError> {
        let mut members: Vec<Option<(Hello, TcpStream)>> = (1..identity.world).map(|_| None).collect();
        let outcome = self.collect(identity, limit, patience, &mut members);
        if let Err(error) = &outcome {
            let reason = error.to_string();
            for (_, stream) in members.iter_mut().flatten() {
                // The error itself is told by rank 0; who has gone already needs no telling.
                let _ = frame::write(stream, &Reply::Refused { reason: reason.clone() });
            }
        }
        outcome.map(|()| members.into_iter().flatten().collect())
    }

    fn collect(
        &self,
        identity: &Identity,
        limit: Duration,
        patience: &Patience,
        members: &mut [Option<(Hello, TcpStream)>],
    ) -> Result<(), RendezvousError> {
        let (sender, arrivals) = mpsc::sync_channel(MAX_PENDING);
        let missing = |members: &[Option<(Hello, TcpStream)>]| -> Vec<RankId> {
            (1..).zip(members).filter(|(_, slot)| slot.is_none()).map(|(rank, _)| RankId::new(rank)).collect()
        };
        let mut pending = 0;
        while members.iter().any(Option::is_none) {
            // Arrivals are read on their own threads, so that a silent stranger holds up nobody.
            match patience.at_most(Duration::from_millis(20)).accept(&self.listener) {
                Ok(stream) if pending < MAX_PENDING => {
                    let (sender, patience) = (sender.clone(), patience.at_most(HELLO_LIMIT));
                    pending += 1;
                    std::thread::spawn(move || {
                        let hello = frame::read::<Hello>(&mut patience.reader(&stream), MAX_HELLO_BYTES);
                        // Rank 0 may have given up meanwhile.
                        let _ = sender.send((hello, stream));
                    });
                }
                Ok(_) | Err(Impatience::Deadline) => {}
                Err(Impatience::Stopped) => return Err(RendezvousError::Stopped),
                Err(Impatience::Io(source)) => return Err(RendezvousError::Io { source }),
            }
            while let Ok((hello, stream)) = arrivals.try_recv() {
                pending -= 1;
                match hello {
                    Ok(hello) => admit(identity, hello, stream, members)?,
                    Err(error) => tracing::warn!(%error, "turned away a connection that is no rank"),
                }
            }
            match patience.slice() {
                Ok(_) => {}
                Err(Impatience::Stopped) => return Err(RendezvousError::Stopped),
                Err(_) => return Err(RendezvousError::Missing { missing: missing(members), limit }),
            }
        }
        Ok(())
    }
}

/// Takes a registration, or tells why not. A second process for a rank is turned away alone.
fn admit(
    identity: &Identity,
    hello: Hello,
    mut stream: TcpStream,
    members: &mut [Option<(Hello, TcpStream)>],
) -> Result<(), RendezvousError> {
    if hello.magic != MAGIC {
        tracing::warn!("turned away a connection that is no rank");
        return Ok(());
    }
    let rank = RankId::new(hello.rank);
    let protocol = (hello.protocol != PROTOCOL)
        .then(|| format!("rank {rank} speaks protocol {}, rank 0 speaks {PROTOCOL}", hello.protocol));
    let mismatch = protocol.or_else(|| identity.difference(rank, &hello.identity)).or_else(|| {
        let fits = (1..identity.world).contains(&hello.rank);
        (!fits)
            .then(|| format!("a process registered as rank {rank}, expected 1 to {}", identity.world.saturating_sub(1)))
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

/// Registers with rank 0 at `address` and connects the data links.
pub(crate) fn join(
    address: SocketAddr,
    rank: RankId,
    identity: &Identity,
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
    let listener = bind(SocketAddr::new(control.local_addr().map_err(io)?.ip(), 0))?;
    let hello = Hello {
        magic: MAGIC.into(),
        protocol: PROTOCOL,
        rank: rank.get(),
        data: listener.local_addr().map_err(io)?,
        identity: identity.clone(),
    };
    let broken = |error: frame::FrameError| match patience.slice() {
        Err(Impatience::Stopped) => RendezvousError::Stopped,
        _ => RendezvousError::BrokenOff { rank: RankId::new(0), cause: error.to_string() },
    };
    frame::write(&mut control, &hello).map_err(broken)?;
    let reply = frame::read::<Reply>(&mut patience.reader(&control), MAX_HELLO_BYTES).map_err(broken)?;
    let (session, addresses) = match reply {
        Reply::Refused { reason } => return Err(RendezvousError::Mismatch { reason }),
        Reply::Welcome { session, data } => (session, data),
    };
    if addresses.len() != usize::from(identity.world) {
        let cause = format!("it named {} ranks, expected {}", addresses.len(), identity.world);
        return Err(RendezvousError::BrokenOff { rank: RankId::new(0), cause });
    }
    let lower: Vec<Option<SocketAddr>> = (0..identity.world)
        .zip(addresses)
        .map(|(peer, data)| (peer < rank.get()).then(|| reachable(data, address.ip())))
        .collect();
    let own = Link { session, from: rank.get(), to: rank.get() };
    let data = mesh::connect(&listener, own, &lower, limit, patience)?;
    unlimited(&control).map_err(io)?;
    Ok(Member { control, data })
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
