//! The phases of a request.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Which tokens of the requests were counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Prompt tokens.
    Prefill,
    /// Generated tokens.
    Decode,
    /// Both; assumed if a file does not state its phase.
    All,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}
