//! Reasons why a unit cannot form, one sentence each.

use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use semmoe_tables::RankId;

use crate::ep::ShmError;

/// An error of any kind.
pub(super) type BoxedError = Box<dyn Error + Send + Sync>;

/// Reasons why the ranks of a unit cannot connect to each other.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    /// An address is in use, or does not belong to this machine.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// Ranks that never registered.
    #[error("{} did not register within {} s{}", ranks(missing), limit.as_secs_f32(), strangers(*other_secrets))]
    Missing {
        /// The ranks.
        missing: Vec<RankId>,
        /// How long rank 0 waited.
        limit: Duration,
        /// Number of connections with a different secret or none.
        other_secrets: usize,
    },
    /// Rank 0 is unreachable.
    #[error("rank 0 could not be reached at {address} within {} s: {source}", limit.as_secs_f32())]
    Unreachable {
        /// Its expected address.
        address: SocketAddr,
        /// The time limit.
        limit: Duration,
        /// The last failure.
        source: BoxedError,
    },
    /// Two ranks were started with different arguments, models, tables or versions. The message names the rank and the
    /// difference.
    #[error("{0}")]
    Mismatch(String),
    /// A rank disconnected while the unit was forming.
    #[error("rank {rank} disconnected while the unit was starting: {source}")]
    BrokenOff {
        /// The rank.
        rank: RankId,
        /// The cause.
        source: BoxedError,
    },
    /// The ranks cannot use shared memory.
    #[error("{0}; ranks without shared memory need --transport tcp")]
    Memory(#[from] ShmError),
    /// The process was asked to stop.
    #[error("stopped before the unit had formed")]
    Stopped,
    /// A local operating system error.
    #[error("the rendezvous failed: {0}")]
    Io(#[from] io::Error),
}

impl RendezvousError {
    /// Creates the error for a rank that disconnected or whose handshake failed.
    pub(super) fn broken_off(rank: RankId, cause: impl Into<BoxedError>) -> Self {
        Self::BrokenOff { rank, source: cause.into() }
    }
}

/// Describes the likely reason for missing ranks.
fn strangers(other_secrets: usize) -> String {
    match other_secrets {
        0 => String::new(),
        count => format!("; {count} connections were rejected because they did not have this unit's secret"),
    }
}

/// Formats ranks as "rank 2", "ranks 1 and 3" or "ranks 1, 2 and 3".
fn ranks(list: &[RankId]) -> String {
    let names: Vec<String> = list.iter().map(RankId::to_string).collect();
    match names.split_last() {
        None => "no rank".into(),
        Some((only, [])) => format!("rank {only}"),
        Some((last, rest)) => format!("ranks {} and {last}", rest.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_ranks_are_named() {
        let text = |list: &[u16]| {
            let missing = list.iter().copied().map(RankId::new).collect();
            RendezvousError::Missing { missing, limit: Duration::from_secs(60), other_secrets: 0 }.to_string()
        };
        assert_eq!(text(&[2]), "rank 2 did not register within 60 s");
        assert_eq!(text(&[1, 2, 3]), "ranks 1, 2 and 3 did not register within 60 s");
    }
}
