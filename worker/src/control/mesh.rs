//! The data links: each rank connects to every lower one and is connected to by every higher one.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use semmoe_tables::RankId;

use super::error::RendezvousError;
use super::frame;
use super::hello::Link;
use super::patience::{Impatience, Patience, unlimited};

/// The longest first frame of a data link.
const MAX_LINK_BYTES: usize = 256;
/// How long a connection may take to say which link it is.
const LINK_LIMIT: Duration = Duration::from_secs(5);

/// Connects `own.to` to the ranks in `lower` (by rank; none for itself and the higher ones) and waits for the higher ones.
/// All listeners are bound before any address is known, so the order of connecting cannot lock up.
pub(super) fn connect(
    listener: &TcpListener,
    own: Link,
    lower: &[Option<SocketAddr>],
    limit: Duration,
    patience: &Patience,
) -> Result<Vec<Option<TcpStream>>, RendezvousError> {
    let me = own.to;
    let mut streams: Vec<Option<TcpStream>> = lower.iter().map(|_| None).collect();
    for (rank, address) in (0..).zip(lower).filter_map(|(rank, address)| Some((rank, (*address)?))) {
        let broken = |cause: String| RendezvousError::BrokenOff { rank: RankId::new(rank), cause };
        let mut stream = patience.connect(address).map_err(|reason| match reason {
            Impatience::Stopped => RendezvousError::Stopped,
            Impatience::Deadline => broken(format!("{address} could not be reached in time")),
            Impatience::Io(error) => broken(format!("{address}: {error}")),
        })?;
        frame::write(&mut stream, &Link { from: me, to: rank, ..own }).map_err(|error| broken(error.to_string()))?;
        streams[usize::from(rank)] = Some(stream);
    }
    while streams.iter().enumerate().any(|(rank, stream)| rank > usize::from(me) && stream.is_none()) {
        let stream = patience.accept(listener).map_err(|reason| match reason {
            Impatience::Stopped => RendezvousError::Stopped,
            Impatience::Io(source) => RendezvousError::Io { source },
            Impatience::Deadline => {
                let missing = (0..).zip(&streams).filter(|(rank, stream)| *rank > me && stream.is_none());
                RendezvousError::Missing { missing: missing.map(|(rank, _)| RankId::new(rank)).collect(), limit }
            }
        })?;
        let link = frame::read::<Link>(&mut patience.at_most(LINK_LIMIT).reader(&stream), MAX_LINK_BYTES);
        match link {
            Ok(link) if link.session == own.session && link.to == me && link.from > me => {
                match streams.get_mut(usize::from(link.from)) {
                    Some(slot @ None) => {
                        unlimited(&stream).map_err(|source| RendezvousError::Io { source })?;
                        *slot = Some(stream);
                    }
                    _ => tracing::warn!(from = link.from, "turned away a second data link"),
                }
            }
            _ => tracing::warn!("turned away a connection that is no data link of this unit"),
        }
    }
    Ok(streams)
}
