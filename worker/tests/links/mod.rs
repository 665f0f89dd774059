//! Connections between ranks.

use std::net::{TcpListener, TcpStream};
use std::time::Duration;

pub(crate) const PATIENT: Duration = Duration::from_secs(120);

/// Both ends of every pair of ranks: `streams[a][b]` is a's stream to b.
pub(crate) fn tcp_streams(world: usize) -> Vec<Vec<Option<TcpStream>>> {
    let mut streams: Vec<Vec<Option<TcpStream>>> = (0..world).map(|_| (0..world).map(|_| None).collect()).collect();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    for (a, b) in (0..world).flat_map(|a| (0..a).map(move |b| (a, b))) {
        streams[a][b] = Some(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        streams[b][a] = Some(listener.accept().unwrap().0);
    }
    streams
}
