//! `serve --watch`: a configuration that is read again when its file changes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;

/// Between two looks. A ConfigMap changes behind two links, of which the kernel reports nothing, so the file is read.
const INTERVAL: Duration = Duration::from_secs(2);
/// Until a change is tried again that engines or files refused: they may fit by then.
const RETRY: Duration = Duration::from_secs(30);

/// A file and its content.
pub(crate) struct Watch {
    file: PathBuf,
    /// As it was read, or tried; `None`: it could not be read.
    judged: Option<Vec<u8>>,
    /// At the last look.
    seen: Option<Vec<u8>>,
    retry: Option<Instant>,
}

impl Watch {
    /// To be called before the configuration is read, so that no change is missed.
    pub(crate) fn new(file: &Path) -> Self {
        let judged = std::fs::read(file).ok();
        Self { file: file.to_owned(), seen: judged.clone(), judged, retry: None }
    }

    /// Resolves when the file holds something else, the same in two looks: its writer may not be done at the first.
    pub(crate) async fn changed(&mut self) {
        loop {
            tokio::time::sleep(INTERVAL).await;
            let file = self.file.clone();
            // The folder may be on a network.
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

    /// The change did not come into force, though nothing is wrong with the file.
    pub(crate) fn try_again(&mut self) {
        self.retry = Some(Instant::now() + RETRY);
    }
}
