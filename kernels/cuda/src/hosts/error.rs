//! What is refused of ranks on several hosts.

/// A call that was refused, or that failed on its way.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HostsError {
    /// Offsets that are no parts of the tokens.
    #[error("the offsets do not ascend from 0 to {tokens} over {ranks} ranks")]
    Offsets {
        /// P
        ranks: usize,
        /// n
        tokens: u64,
    },
    /// Counts that no plan could have.
    #[error("{what} are {found}, expected {expected}")]
    Counts {
        /// Which.
        what: &'static str,
        /// How many there are, or what they add up to.
        found: u64,
        /// What it should be, or at most.
        expected: u64,
    },
    /// A buffer that is too small.
    #[error("{what} has {found} bytes, expected at least {expected}")]
    Short {
        /// Which.
        what: &'static str,
        /// Bytes it has.
        found: u64,
        /// Bytes the call needs.
        expected: u64,
    },
    /// A call that was refused before any launch.
    #[error(transparent)]
    Launch(#[from] crate::error::LaunchError),
    /// The driver's own words.
    #[error("the GPU refused: {0}")]
    Device(String),
    /// NCCL's own words.
    #[error("NCCL refused: {0}")]
    Nccl(String),
}
