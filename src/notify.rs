//! systemd's `Type=notify` protocol: one datagram to the socket named by the supervisor.

#[cfg(target_os = "linux")]
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;

/// The states that a service can report.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Notice {
    /// The service accepts requests.
    Ready,
    /// The service was asked to stop and is finishing its work.
    Stopping,
}

/// Notifies the supervisor, if any (`NOTIFY_SOCKET`). If it cannot be reached, logs a warning and keeps serving.
pub(crate) fn notify(notice: Notice) {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET").filter(|socket| !socket.is_empty()) else { return };
    let message: &[u8] = match notice {
        Notice::Ready => b"READY=1",
        Notice::Stopping => b"STOPPING=1",
    };
    let sent =
        address(socket.as_encoded_bytes()).and_then(|address| UnixDatagram::unbound()?.send_to_addr(message, &address));
    if let Err(error) = sent {
        tracing::warn!(?socket, %error, "cannot notify the supervisor");
    }
}

/// Parses a path or, with a leading `@`, a name in Linux's abstract namespace.
fn address(socket: &[u8]) -> std::io::Result<SocketAddr> {
    use std::os::unix::ffi::OsStrExt;
    match socket {
        #[cfg(target_os = "linux")]
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        path => SocketAddr::from_pathname(Path::new(std::ffi::OsStr::from_bytes(path))),
    }
}
