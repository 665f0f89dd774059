//! `serve --watch`: reloads a configuration when its file changes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;

/// Polling interval. A ConfigMap changes behind two links, and the kernel reports neither change, so the file is read.
const INTERVAL: Duration = Duration::from_secs(2);
/// Interval before retrying a change that engines or files did not match: they may match by then.
const RETRY: Duration = Duration::from_secs(30);

/// A file and its content.
pub(crate) struct Watch {
    file: PathBuf,
    /// The content last read or tried; `None` if it could not be read.
    judged: Option<Vec<u8>>,
    /// The content at the last poll.
    seen: Option<Vec<u8>>,
    retry: Option<Instant>,
}

impl Watch {
    /// Must be called before the configuration is read, so that no change is missed.
    pub(crate) fn new(file: &Path) -> Self {
        let judged = std::fs::read(file).ok();
        Self { file: file.to_owned(), seen: judged.clone(), judged, retry: None }
    }

    /// Resolves once the content has changed and two polls in a row agree: the first may catch a write in progress.
    pub(crate) async fn changed(&mut self) {
        loop {
            tokio::time::sleep(INTERVAL).await;
            let file = self.file.clone();
            // The directory may be on a network.
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

    /// The change did not take effect, although the file itself is valid.
    pub(crate) fn try_again(&mut self) {
        self.retry = Some(Instant::now() + RETRY);
    }
}
