//! Counts connections per client address, if their number is limited.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

#[derive(Default)]
pub(super) struct Peers {
    counts: Mutex<HashMap<IpAddr, usize>>,
}

/// An address's connection, counted until it is dropped.
pub(super) struct Peer {
    peers: Arc<Peers>,
    address: IpAddr,
}

impl Peers {
    /// Registers a connection; returns `None` if the address already has `limit` connections.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr, limit: usize) -> Option<Peer> {
        // An IPv4 client must not count as two addresses.
        let address = address.to_canonical();
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(address).or_default();
        if *count >= limit {
            return None;
        }
        *count += 1;
        Some(Peer { peers: Arc::clone(self), address })
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let mut counts = self.peers.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_its_limit_and_leaves_nothing_behind() {
        let peers = Arc::new(Peers::default());
        let (one, mapped): (IpAddr, IpAddr) = ("10.0.0.1".parse().unwrap(), "::ffff:10.0.0.1".parse().unwrap());
        let first = peers.enter(one, 2).unwrap();
        let second = peers.enter(mapped, 2).unwrap();
        assert!(peers.enter(one, 2).is_none());
        let other = peers.enter("10.0.0.2".parse().unwrap(), 2);
        assert!(other.is_some());
        drop(first);
        assert!(peers.enter(one, 2).is_some());
        drop((second, other));
        assert!(peers.counts.lock().unwrap().is_empty());
    }
}
