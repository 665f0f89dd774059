//! Opens connections to engines: TCP, with TLS for https URLs.

use std::io;
use std::time::{Duration, Instant};

use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;

use super::HttpError;
use super::connection::{Connection, Stream};
use super::pool::Origin;
use crate::SharedError;
use crate::tls::ClientTls;

/// Linux error numbers of ENOMEM, ENFILE, EMFILE, EADDRNOTAVAIL and ENOBUFS.
const EXHAUSTED: [i32; 5] = [12, 23, 24, 99, 105];

const HTTP_PORT: u16 = 80;
const HTTPS_PORT: u16 = 443;

/// The reason for a failed connection attempt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoConnection {
    /// The engine or the network is at fault.
    #[error("{0}")]
    Theirs(SharedError),
    /// This machine ran out of file descriptors, ports or memory.
    #[error("{0}")]
    Ours(SharedError),
}

#[derive(Debug, thiserror::Error)]
#[error("TLS: {0}")]
struct Handshake(#[source] io::Error);

impl NoConnection {
    fn of(error: io::Error) -> Self {
        let is_ours = error.raw_os_error().is_some_and(|code| EXHAUSTED.contains(&code));
        if is_ours { Self::Ours(error.into()) } else { Self::Theirs(error.into()) }
    }

    /// Converts this into the error of a request to `url`.
    pub(super) fn into_http(self, url: String) -> HttpError {
        match self {
            Self::Theirs(source) => HttpError::Connect { url, source },
            Self::Ours(source) => HttpError::Exhausted(source),
        }
    }
}

/// Makes a new connection.
pub(super) async fn connect(
    origin: &Origin,
    tls: Option<&ClientTls>,
    limit: Duration,
) -> Result<Box<Connection>, NoConnection> {
    let stream = open(origin, tls, limit).await?;
    Connection::handshake(stream).await.map(Box::new).map_err(|error| NoConnection::Theirs(error.into()))
}

/// Opens the transport for HTTP. `limit` applies to TCP and to TLS separately.
pub(super) async fn open(
    origin: &Origin,
    tls: Option<&ClientTls>,
    limit: Duration,
) -> Result<Box<dyn Stream>, NoConnection> {
    let stream = tcp(origin, limit).await?;
    if !origin.secure {
        return Ok(Box::new(stream));
    }
    let theirs = NoConnection::Theirs;
    let tls = tls.ok_or_else(|| theirs("no certificates are configured for https".into()))?;
    let secured = timeout(limit, tls.connect(origin.authority.host(), stream)).await;
    let secured = secured.map_err(|_| theirs(format!("no TLS handshake within {limit:?}").into()))?;
    Ok(Box::new(secured.map_err(|error| theirs(Handshake(error).into()))?))
}

/// Tries every address of the host name in turn, dividing the remaining time equally among them.
async fn tcp(origin: &Origin, limit: Duration) -> Result<TcpStream, NoConnection> {
    let begin = Instant::now();
    let late = || NoConnection::Theirs(format!("no connection within {limit:?}").into());
    let host = origin.authority.host();
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let port = origin.authority.port_u16().unwrap_or(if origin.secure { HTTPS_PORT } else { HTTP_PORT });
    let resolved = timeout(limit, lookup_host((host, port))).await;
    let addresses: Vec<_> = resolved.map_err(|_| late())?.map_err(NoConnection::of)?.collect();
    let mut cause = NoConnection::Theirs("the host name has no address".into());
    for (tried, address) in (0u32..).zip(&addresses) {
        let left = u32::try_from(addresses.len()).unwrap_or(u32::MAX).saturating_sub(tried).max(1);
        match timeout(limit.saturating_sub(begin.elapsed()) / left, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                // Requests are written in one go and are urgent. If a socket rejects this option, it is closing anyway.
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Ok(Err(error)) => cause = NoConnection::of(error),
            Err(_) => cause = late(),
        }
    }
    Err(cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_this_machine_lacks_is_no_fault_of_an_engine() {
        let of =
            |code| NoConnection::of(io::Error::from_raw_os_error(code)).into_http("http://pod-a:30000/".to_owned());
        for code in EXHAUSTED {
            let error = of(code);
            assert!(matches!(error, HttpError::Exhausted { .. }), "{code}: {error}");
            assert!(!error.may_have_been_sent() && !error.to_string().contains("pod-a"), "{error}");
        }
        // Refused, unreachable, reset, timed out.
        for code in [111, 113, 104, 110] {
            assert!(matches!(of(code), HttpError::Connect { .. }), "{code}");
        }
    }
}
