//! One sentence on figures, and what to type next.

use std::fmt;

use serde::Serialize;

/// How good something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Grade {
    /// There is nothing to gain, or the figures cannot be believed.
    Poor,
    /// Something is gained, and something is in the way.
    Fair,
    /// Go on.
    Good,
}

impl Grade {
    /// In one word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Poor => "poor",
            Self::Fair => "fair",
            Self::Good => "good",
        }
    }
}

/// The interpretation of figures, and the next command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// How good it is.
    pub grade: Grade,
    /// Why.
    pub text: String,
    /// The command to go on with.
    pub next: String,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "verdict: {}. {}\nnext:    {}", self.grade.name(), self.text, self.next)
    }
}
