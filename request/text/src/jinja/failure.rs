//! Limits on a rendering, and why one fails.

/// Maximum depth of nested calls, expressions and statements.
pub(super) const MAX_DEPTH: u32 = 250;
/// Maximum nesting of lists made by a template.
pub(super) const MAX_VALUE_DEPTH: u32 = 100;

/// Limits on one rendering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Expressions, statements, items of lists, and parts of texts.
    pub steps: u64,
    /// Bytes of all texts and lists created.
    pub bytes: usize,
}

impl Budget {
    /// A few milliseconds, for renderings that block others.
    pub const BRIEF: Self = Self { steps: 50_000, bytes: 2 << 20 };
}

impl Default for Budget {
    /// About a second, and a hundred times the prompt of a long chat.
    fn default() -> Self {
        Self { steps: 20_000_000, bytes: 256 << 20 }
    }
}

/// Why a template did not render a chat.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Jinja2 raises an error as well.
    Refused(String),
    /// Rendering exceeds the budget.
    TooMuch { what: &'static str, limit: u64 },
}

pub(super) type Fallible<T> = Result<T, Failure>;

pub(super) fn refused<T>(reason: impl Into<String>) -> Fallible<T> {
    Err(Failure::Refused(reason.into()))
}
