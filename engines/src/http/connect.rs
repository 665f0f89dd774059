//! Making connections: TCP, and TLS on it where the URL says https.

use std::time::{Duration, Instant};

use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;

use super::connection::{Connection, Stream};
use super::pool::Origin;
use crate::tls::ClientTls;

const HTTP_PORT: u16 = 80;
const HTTPS_PORT: u16 = 443;

/// A new connection; on failure the cause in words.
pub(super) async fn connect(
    origin: &Origin,
    tls: Option<&ClientTls>,
    limit: Duration,
) -> Result<Box<Connection>, String> {
    let stream = open(origin, tls, limit).await?;
    Connection::handshake(stream).await.map(Box::new).map_err(|error| error.to_string())
}

/// What HTTP runs over. `limit` is for TCP and for TLS, each.
pub(super) async fn open(origin: &Origin, tls: Option<&ClientTls>, limit: Duration) -> Result<Box<dyn Stream>, String> {
    let stream = tcp(origin, limit).await?;
    if !origin.secure {
        return Ok(Box::new(stream));
    }
    let tls = tls.ok_or("no certificates were configured for https")?;
    let secured = timeout(limit, tls.connect(origin.authority.host(), stream)).await;
    let secured = secured.map_err(|_| format!("no TLS handshake within {limit:?}"))?;
    Ok(Box::new(secured.map_err(|error| format!("TLS: {error}"))?))
}

/// Tries every address of a name, each for an equal share of the time that is left.
async fn tcp(origin: &Origin, limit: Duration) -> Result<TcpStream, String> {
    let begin = Instant::now();
    let late = || format!("no connection within {limit:?}");
    let host = origin.authority.host();
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let port = origin.authority.port_u16().unwrap_or(if origin.secure { HTTPS_PORT } else { HTTP_PORT });
    let resolved = timeout(limit, lookup_host((host, port))).await;
    let addresses: Vec<_> = resolved.map_err(|_| late())?.map_err(|error| error.to_string())?.collect();
    let mut cause = "its name has no address".to_owned();
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
