//! Backends found by SRV records. The nameservers in `/etc/resolv.conf` are queried over TCP for hosts and ports; as
//! elsewhere, the resolver looks up the hosts' addresses.
//!
//! Over TCP an answer is complete (never truncated, as over UDP) and cannot be forged by guessing its id.

mod message;

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use futures_util::{StreamExt, stream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::answer::{Answer, MAX_FOUND, Resolve};
use message::{MessageError, Service, question, records};

/// Maximum wait for one nameserver; there are at most three.
const SERVER_TIMEOUT: Duration = Duration::from_millis(1500);
/// Maximum number of nameservers, as in the system's resolver.
const MAX_SERVERS: usize = 3;
const DNS_PORT: u16 = 53;
/// Number of hosts resolved concurrently.
const LOOKUPS: usize = 16;
/// Maximum number of bytes read from `/etc/resolv.conf`.
const CONFIG_BYTES: u64 = 64 << 10;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum SrvError {
    /// Reading the list of nameservers failed.
    #[error("cannot read the nameservers in /etc/resolv.conf: {0}")]
    Servers(io::Error),
    /// None of the nameservers has a usable address.
    #[error("/etc/resolv.conf has no nameserver with a usable address")]
    NoServers,
    /// The nameserver could not be reached, or the connection broke.
    #[error("nameserver {server} (TCP): {source}")]
    Server {
        /// The nameserver.
        server: SocketAddr,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The nameserver's answer is unusable.
    #[error("nameserver {server}: {source}")]
    Message {
        /// The nameserver.
        server: SocketAddr,
        /// The problem.
        source: MessageError,
    },
    /// None of the targets has an address.
    #[error("target {target}: {source}")]
    Target {
        /// The first target without an address.
        target: String,
        /// The resolver's reason.
        source: io::Error,
    },
}

/// Returns the service instances with the lowest priority number, as SRV records require. Weights are ignored, because
/// requests are balanced by load.
pub(super) async fn query(resolver: &dyn Resolve, name: &str) -> Result<Answer, SrvError> {
    let mut services = services(resolver, name).await?;
    let first = services.iter().map(|service| service.priority).min();
    let all = services.len();
    services.retain(|service| Some(service.priority) == first);
    let spare = all - services.len();
    let note =
        first.filter(|_| spare > 0).map(|first| format!("{spare} records with priorities after {first} are not used"));
    let targets: BTreeSet<(String, u16)> = services.into_iter().map(|service| (service.target, service.port)).collect();
    let answer = addresses(resolver, targets).await?;
    Ok(Answer { note, ..answer })
}

/// Queries the nameservers in turn until one can resolve the name.
async fn services(resolver: &dyn Resolve, name: &str) -> Result<Vec<Service>, SrvError> {
    let servers = resolver.nameservers().map_err(SrvError::Servers)?;
    let mut last = SrvError::NoServers;
    for server in servers.into_iter().take(MAX_SERVERS) {
        let timed = tokio::time::timeout(SERVER_TIMEOUT, exchange(server, name)).await;
        let done = timed.unwrap_or_else(|_| Err(SrvError::Server { server, source: io::ErrorKind::TimedOut.into() }));
        match done {
            Ok(services) => return Ok(services),
            Err(error @ SrvError::Message { source: MessageError::NoSuchName, .. }) => return Err(error),
            Err(error) => last = error,
        }
    }
    Err(last)
}

async fn exchange(server: SocketAddr, name: &str) -> Result<Vec<Service>, SrvError> {
    let id = fastrand::u16(..);
    let unreadable = |source| SrvError::Message { server, source };
    let asked = question(id, name).map_err(unreadable)?;
    let message = send(server, &asked).await.map_err(|source| SrvError::Server { server, source })?;
    records(&message, id, name).map_err(unreadable)
}

/// Sends a message and receives its answer, each with a length prefix. The answer has at most 65,535 bytes.
async fn send(server: SocketAddr, message: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(server).await?;
    let length = u16::try_from(message.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes()[..], message].concat()).await?;
    let mut answer = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut answer).await?;
    Ok(answer)
}

/// Looks up all targets' addresses. Targets that do not resolve are reported, and the others are used.
async fn addresses(resolver: &dyn Resolve, targets: BTreeSet<(String, u16)>) -> Result<Answer, SrvError> {
    let too_many = targets.len().saturating_sub(MAX_FOUND);
    let lookup = |(target, port): (String, u16)| async move {
        // A trailing dot disables the search list.
        let found = resolver.resolve(format!("{target}.:{port}")).await;
        (target, found)
    };
    let mut lookups = stream::iter(targets.into_iter().take(MAX_FOUND)).map(lookup).buffered(LOOKUPS);
    let (mut answer, mut missing, mut first) = (Answer::default(), 0, None);
    while let Some((target, found)) = lookups.next().await {
        match found {
            Ok(found) => answer.addresses.extend(found),
            Err(source) => {
                missing += 1;
                first.get_or_insert(SrvError::Target { target, source });
            }
        }
    }
    match first {
        Some(error) if answer.addresses.is_empty() => return Err(error),
        Some(error) => answer.gaps = Some(format!("{missing} targets have no address; the first: {error}")),
        None if too_many > 0 => answer.gaps = Some(format!("{too_many} targets beyond {MAX_FOUND} are left out")),
        None => {}
    }
    Ok(answer)
}

/// Returns the nameservers in `/etc/resolv.conf`; if it lists none, this machine, as resolv.conf(5) specifies.
pub(super) fn configured_nameservers() -> io::Result<Vec<SocketAddr>> {
    let mut text = String::new();
    io::Read::read_to_string(&mut io::Read::take(std::fs::File::open("/etc/resolv.conf")?, CONFIG_BYTES), &mut text)?;
    Ok(nameservers(&text))
}

fn nameservers(text: &str) -> Vec<SocketAddr> {
    let lines = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        if words.next() == Some("nameserver") { words.next() } else { None }
    });
    let lines: Vec<&str> = lines.collect();
    if lines.is_empty() {
        return vec![SocketAddr::from(([127, 0, 0, 1], DNS_PORT))];
    }
    // The standard library does not parse addresses with a zone (`fe80::1%eth0`).
    let addresses = lines.iter().filter_map(|line| line.parse::<IpAddr>().ok());
    addresses.map(|address| SocketAddr::new(address, DNS_PORT)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nameservers_are_read_as_the_system_reads_them() {
        let text =
            "# nameserver 9.9.9.9\nsearch a b\nnameserver 10.0.0.10\n nameserver\t::1 # x\nnameserver fe80::1%eth0\n";
        let found: Vec<String> = nameservers(text).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["10.0.0.10:53", "[::1]:53"]);
        assert_eq!(nameservers("options ndots:5\n")[0].to_string(), "127.0.0.1:53");
        assert!(nameservers("nameserver fe80::1%eth0\n").is_empty());
    }
}
