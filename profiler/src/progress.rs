//! Progress reporting for long operations.

/// Receives progress, which the caller shows as a bar, as lines or not at all.
pub trait Progress: Sync {
    /// Sets the number of steps.
    fn set_total(&self, total: u64);
    /// Reports that `by` more steps are done.
    fn advance(&self, by: u64);
    /// Reports a short message, such as the speed or the remaining time.
    fn message(&self, text: &str);
}

/// Ignores progress.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn set_total(&self, _total: u64) {}
    fn advance(&self, _by: u64) {}
    fn message(&self, _text: &str) {}
}
