//! How long work reports how far it is.

/// Shown by the caller as a bar, as lines or not at all.
pub trait Progress: Sync {
    /// How many steps there are.
    fn set_total(&self, total: u64);
    /// `by` more steps are done.
    fn advance(&self, by: u64);
    /// A short remark: speed, time left.
    fn message(&self, text: &str);
}

/// Shows nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn set_total(&self, _total: u64) {}
    fn advance(&self, _by: u64) {}
    fn message(&self, _text: &str) {}
}
