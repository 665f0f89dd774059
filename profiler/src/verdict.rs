//! A verdict: a short interpretation of figures, and the next command to run.

use std::fmt;

use serde::Serialize;

/// An overall grade.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Grade {
    /// There is nothing to gain, or the figures are unreliable.
    Poor,
    /// There is a gain, but an obstacle limits it.
    Fair,
    /// Worth continuing.
    Good,
}

impl Grade {
    /// The grade in one word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Poor => "poor",
            Self::Fair => "fair",
            Self::Good => "good",
        }
    }
}

/// An interpretation of figures, and the next command to run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// The grade.
    pub grade: Grade,
    /// The explanation.
    pub text: String,
    /// The recommended next command.
    pub next: String,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "verdict: {}. {}\nnext:    {}", self.grade.name(), self.text, self.next)
    }
}
