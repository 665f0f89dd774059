//! The handshake on every connection between ranks: both sides prove that they know the unit's secret without sending
//! it. The acceptor sends the first message.
//!
//! | step | from | content |
//! |---|---|---|
//! | greeting | acceptor | a nonce, if it has a secret |
//! | answer | connector | its own nonce, and its proof: HMAC-SHA-256 of the secret over role, purpose and both nonces |
//! | verdict | acceptor | its proof over the other role, or a refusal |
//!
//! The handshake authenticates both ends once. Later traffic is neither encrypted nor signed, so links between hosts
//! must use a trusted network.

use std::fs::File;
use std::io::{self, Read};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::frame::{self, FrameError};
use super::hello::{MAGIC, PROTOCOL};
use super::patience::{Impatience, Patience};
use super::secret::{PROOF_BYTES, Secret};

/// Maximum number of connection attempts, and the pause between them. Retries are needed because a listener flooded by
/// unauthenticated clients may drop a rank's connection.
const ATTEMPTS: u32 = 40;
const PAUSE: Duration = Duration::from_millis(50);
/// Connect timeout for a listener that was reachable a moment ago.
const STILL_THERE: Duration = Duration::from_secs(1);
/// Size limit of handshake frames.
const MAX_BYTES: usize = 1024;

/// The purpose of a connection; a proof for one purpose is invalid for the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Control,
    Data,
}

impl Purpose {
    fn label(self) -> &'static [u8] {
        match self {
            Self::Control => b"control",
            Self::Data => b"data",
        }
    }
}

type Nonce = [u8; 32];

#[derive(Serialize, Deserialize)]
struct Greeting {
    magic: String,
    protocol: u32,
    nonce: Option<Nonce>,
}

#[derive(Serialize, Deserialize)]
struct Answer {
    magic: String,
    proof: Option<(Nonce, [u8; PROOF_BYTES])>,
}

#[derive(Serialize, Deserialize)]
enum Verdict {
    Known { proof: Option<[u8; PROOF_BYTES]> },
    Refused,
}

/// Reasons for a failed handshake.
#[derive(Debug, thiserror::Error)]
pub(super) enum AuthError {
    /// The connection broke, or the received bytes are not a handshake.
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("it is not a rank")]
    Stranger,
    #[error("it speaks protocol {found}, but this rank speaks {PROTOCOL}")]
    Protocol { found: u32 },
    #[error("it requires a secret, but this rank was started without one")]
    SecretMissing,
    #[error("it was started without a secret, but this rank requires one")]
    SecretUnasked,
    #[error("its secret differs from this rank's")]
    OtherSecret,
}

impl AuthError {
    /// Whether the connection ended early.
    fn is_broken(&self) -> bool {
        match self {
            Self::Frame(FrameError::Closed) => true,
            Self::Frame(FrameError::Io(error)) => error.kind() != io::ErrorKind::TimedOut,
            _ => false,
        }
    }

    /// Whether the two sides were started with different secrets.
    pub(super) fn is_secret(&self) -> bool {
        matches!(self, Self::SecretMissing | Self::SecretUnasked | Self::OtherSecret)
    }
}

/// The acceptor's side.
pub(super) fn accept(
    stream: &mut TcpStream,
    purpose: Purpose,
    secret: Option<&Secret>,
    patience: &Patience,
) -> Result<(), AuthError> {
    let nonce = secret.map(|_| nonce()).transpose().map_err(FrameError::Io)?;
    frame::write(stream, &Greeting { magic: MAGIC.into(), protocol: PROTOCOL, nonce })?;
    let answer: Answer = frame::read(&mut patience.reader(stream), MAX_BYTES)?;
    if answer.magic != MAGIC {
        return Err(AuthError::Stranger);
    }
    let proof = match (secret, nonce, answer.proof) {
        (Some(secret), Some(nonce), Some((theirs, proof)))
            if secret.proves(&parts(b"connector", purpose, &nonce, &theirs), &proof) =>
        {
            Some(secret.proof(&parts(b"acceptor", purpose, &nonce, &theirs)))
        }
        (None, None, None) => None,
        _ => {
            // Best effort: the connector may have disconnected.
            let _ = frame::write(stream, &Verdict::Refused);
            return Err(AuthError::OtherSecret);
        }
    };
    Ok(frame::write(stream, &Verdict::Known { proof })?)
}

/// The reason that there is no authenticated connection.
#[derive(Debug)]
pub(super) enum Unproven {
    /// No connection was made.
    Unreachable(Impatience),
    /// The connection broke, or one side rejected the other.
    Refused(AuthError),
}

/// Connects and authenticates. If a connection ends before the verdict, retries as long as the listener is reachable.
pub(super) fn reach(
    address: SocketAddr,
    purpose: Purpose,
    secret: Option<&Secret>,
    patience: &Patience,
) -> Result<TcpStream, Unproven> {
    let mut stream = patience.connect(address).map_err(Unproven::Unreachable)?;
    for _ in 1..ATTEMPTS {
        let error = match connect(&mut stream, purpose, secret, patience) {
            Ok(()) => return Ok(stream),
            Err(error) => error,
        };
        if !error.is_broken() {
            return Err(Unproven::Refused(error));
        }
        std::thread::sleep(PAUSE);
        let Ok(next) = patience.at_most(STILL_THERE).connect(address) else { return Err(Unproven::Refused(error)) };
        stream = next;
    }
    connect(&mut stream, purpose, secret, patience).map_err(Unproven::Refused)?;
    Ok(stream)
}

/// The connector's side.
pub(super) fn connect(
    stream: &mut TcpStream,
    purpose: Purpose,
    secret: Option<&Secret>,
    patience: &Patience,
) -> Result<(), AuthError> {
    let greeting: Greeting = frame::read(&mut patience.reader(stream), MAX_BYTES)?;
    if greeting.magic != MAGIC {
        return Err(AuthError::Stranger);
    }
    if greeting.protocol != PROTOCOL {
        return Err(AuthError::Protocol { found: greeting.protocol });
    }
    let own = nonce().map_err(FrameError::Io)?;
    let proof = match (secret, greeting.nonce) {
        (None, None) => None,
        (None, Some(_)) => return Err(AuthError::SecretMissing),
        (Some(_), None) => return Err(AuthError::SecretUnasked),
        (Some(secret), Some(nonce)) => Some((own, secret.proof(&parts(b"connector", purpose, &nonce, &own)))),
    };
    frame::write(stream, &Answer { magic: MAGIC.into(), proof })?;
    match frame::read(&mut patience.reader(stream), MAX_BYTES)? {
        Verdict::Refused => Err(AuthError::OtherSecret),
        Verdict::Known { proof } => match (secret, greeting.nonce, proof) {
            (None, _, _) => Ok(()),
            (Some(secret), Some(nonce), Some(proof))
                if secret.proves(&parts(b"acceptor", purpose, &nonce, &own), &proof) =>
            {
                Ok(())
            }
            _ => Err(AuthError::OtherSecret),
        },
    }
}

fn parts<'a>(role: &'a [u8], purpose: Purpose, acceptor: &'a Nonce, connector: &'a Nonce) -> [&'a [u8]; 5] {
    [MAGIC.as_bytes(), role, purpose.label(), acceptor, connector]
}

/// Returns a random nonce from the operating system; a predictable nonce would make it possible to answer without the
/// secret.
fn nonce() -> io::Result<Nonce> {
    let mut nonce = Nonce::default();
    File::open("/dev/urandom")?.read_exact(&mut nonce)?;
    Ok(nonce)
}

#[cfg(test)]
#[path = "auth_tests.rs"]
mod tests;
