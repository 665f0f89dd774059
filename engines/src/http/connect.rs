//! Making connections.

use std::time::{Duration, Instant};

use ::http::uri::Authority;
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;

use super::connection::{Connection, Stream};

const HTTP_PORT: u16 = 80;

/// A new connection; on failure the cause in words.
pub(super) async fn connect(origin: &Authority, limit: Duration) -> Result<Box<Connection>, String> {
    let stream = tcp(origin, limit).await?;
    let stream: Box<dyn Stream> = Box::new(stream);
    Connection::handshake(stream).await.map(Box::new).map_err(|error| error.to_string())
}

/// Tries every address of a name, each for an equal share of the time that is left.
async fn tcp(origin: &Authority, limit: Duration) -> Result<TcpStream, String> {
    let begin = Instant::now();
    let late = || format!("no connection within {limit:?}");
    let host = origin.host();
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let resolved = timeout(limit, lookup_host((host, origin.port_u16().unwrap_or(HTTP_PORT)))).await;
    let addresses: Vec<_> = resolved.map_err(|_| late())?.map_err(|error| error.to_string())?.collect();
    let mut cause = format!("'{host}' has no address");
    for (tried, address) in (0u32..).zip(&addresses) {
        let left = u32::try_from(addresses.len()).unwrap_or(u32::MAX).saturating_sub(tried).max(1);
        match timeout(limit.saturating_sub(begin.elapsed()) / left, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                // Requests are written whole, and are urgent. A socket that refuses this is closing anyway.
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Ok(Err(error)) => cause = error.to_string(),
            Err(_) => cause = late(),
        }
    }
    Err(cause)
}
