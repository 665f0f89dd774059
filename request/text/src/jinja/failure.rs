//! Limits on rendering a template, and the reasons why rendering fails.

/// Maximum depth of nested calls, expressions and statements.
pub(super) const MAX_DEPTH: u32 = 250;
/// Maximum nesting of lists made by a template.
pub(super) const MAX_VALUE_DEPTH: u32 = 100;

/// Limits on rendering a template once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Number of steps: expressions, statements, list items, and parts of texts.
    pub steps: u64,
    /// Total bytes of all texts and lists created.
    pub bytes: usize,
}

impl Budget {
    /// A budget of a few milliseconds, for rendering on a thread that other requests need.
    pub const BRIEF: Self = Self { steps: 50_000, bytes: 2 << 20 };
}

impl Default for Budget {
    /// A budget of about a second, and a hundred times the memory of a long chat's prompt.
    fn default() -> Self {
        Self { steps: 20_000_000, bytes: 256 << 20 }
    }
}

/// The reason why a template did not render a chat.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The template failed with an error that Jinja2 also raises.
    Refused(String),
    /// Rendering exceeds the budget.
    TooMuch { what: &'static str, limit: u64 },
}

pub(super) type Fallible<T> = Result<T, Failure>;

pub(super) fn refused<T>(reason: impl Into<String>) -> Fallible<T> {
    Err(Failure::Refused(reason.into()))
}
