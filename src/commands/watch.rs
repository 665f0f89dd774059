//! `serve --watch`: reloads a configuration when its file changes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;

/// Polling interval. A mounted ConfigMap changes behind two symlinks, which the kernel does not report for the file
/// itself, so it is polled.
const INTERVAL: Duration = Duration::from_secs(2);
/// Delay before retrying a configuration that did not match engines or files, which may match by then.
const RETRY: Duration = Duration::from_secs(30);

/// A watched file and its last known contents.
pub(crate) struct Watch {
    file: PathBuf,
    /// The content of the last reload attempt; `None` if the file could not be read.
    judged: Option<Vec<u8>>,
    /// The content at the last poll.
    seen: Option<Vec<u8>>,
    retry: Option<Instant>,
}

impl Watch {
    /// Must be called before the configuration is loaded, so that no change is missed.
    pub(crate) fn new(file: &Path) -> Self {
        let judged = std::fs::read(file).ok();
        Self { file: file.to_owned(), seen: judged.clone(), judged, retry: None }
    }

    /// Resolves once the content has changed and two consecutive polls agree, as the first may catch a partial write.
    pub(crate) async fn changed(&mut self) {
        loop {
            tokio::time::sleep(INTERVAL).await;
            let file = self.file.clone();
            // Reads may block, as the file may be on a network file system.
            let Ok(now) = tokio::task::spawn_blocking(move || std::fs::read(file).ok()).await else { continue };
            let settled = now == self.seen;
            self.seen = now;
            let due = self.retry.is_some_and(|retry| retry <= Instant::now());
            if settled && (due || self.seen != self.judged) {
                self.judged.clone_from(&self.seen);
                self.retry = None;
                return;
            }
        }
    }

    /// Schedules a retry of a change that was not applied although the file itself is valid.
    pub(crate) fn try_again(&mut self) {
        self.retry = Some(Instant::now() + RETRY);
    }
}
