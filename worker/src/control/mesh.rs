//! Data links: each rank connects to all lower ranks and accepts connections from all higher ranks.

use std::net::{SocketAddr, TcpListener, TcpStream};

use semmoe_tables::RankId;

use super::acceptor::Acceptor;
use super::auth::{self, Purpose, Unproven};
use super::error::{BoxedError, RendezvousError};
use super::frame;
use super::hello::Link;
use super::patience::{Patience, unlimited};
use super::rendezvous::distrust;
use super::secret::Secret;

/// Size limit of a data link's first frame.
const MAX_LINK_BYTES: usize = 256;

/// Connects to the ranks in `lower` (indexed by rank; `None` for this rank and higher ones) and accepts connections
/// from the higher ranks. All listeners are bound before any address is announced, so no order of connecting can
/// deadlock.
pub(super) fn connect(
    listener: &TcpListener,
    own: Link,
    lower: &[Option<SocketAddr>],
    secret: Option<&Secret>,
    patience: &Patience,
) -> Result<Vec<Option<TcpStream>>, RendezvousError> {
    let me = own.to;
    let mut streams: Vec<Option<TcpStream>> = lower.iter().map(|_| None).collect();
    for (rank, address) in (0..).zip(lower).filter_map(|(rank, address)| Some((RankId::new(rank), (*address)?))) {
        let broken = |cause: BoxedError| RendezvousError::broken_off(rank, format!("{address}: {cause}"));
        let mut stream = auth::reach(address, Purpose::Data, secret, patience).map_err(|cause| match cause {
            Unproven::Unreachable(reason) => reason.or("it could not be reached in time", broken),
            Unproven::Refused(error) => distrust(rank, &error),
        })?;
        unlimited(&stream)?;
        let link = Link { from: me, to: rank.get(), ..own };
        frame::write(&mut stream, &link).map_err(|error| RendezvousError::broken_off(rank, error))?;
        streams[rank.index()] = Some(stream);
    }
    let mut acceptor = Acceptor::new(listener, Purpose::Data, secret.cloned(), MAX_LINK_BYTES);
    let take_all = |streams: &mut [Option<TcpStream>], come: Vec<(Link, TcpStream)>| {
        come.into_iter().try_for_each(|(link, stream)| take(link, stream, own, streams))
    };
    acceptor.gather(&mut streams[usize::from(me) + 1..], me + 1, take_all, patience)?;
    Ok(streams)
}

/// Accepts a data link if it belongs to this unit; `higher` contains the streams of the ranks above this one.
fn take(link: Link, stream: TcpStream, own: Link, higher: &mut [Option<TcpStream>]) -> Result<(), RendezvousError> {
    if link.session != own.session || link.to != own.to || link.from <= own.to {
        tracing::warn!("rejected a connection that is not a data link of this unit");
        return Ok(());
    }
    match higher.get_mut(usize::from(link.from - own.to) - 1) {
        Some(slot @ None) => {
            unlimited(&stream)?;
            *slot = Some(stream);
        }
        _ => tracing::warn!(from = link.from, "rejected a second data link"),
    }
    Ok(())
}
