//! The phases of a request.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The request tokens that a profile counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Prompt tokens.
    Prefill,
    /// Generated tokens.
    Decode,
    /// Both prompt and generated tokens; assumed if a file does not specify its phase.
    All,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}
