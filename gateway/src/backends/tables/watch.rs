//! Polls tables files for changes, and frees replaced state at the same interval.
//!
//! Files are polled every few seconds. Kernel notifications cover neither network file systems nor a ConfigMap, whose
//! files change behind two links, and would still require waiting until the writer has finished.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use semmoe_engines::probe::Probe;
use tokio_util::sync::CancellationToken;

use crate::backends::{Backends, RequestError, Snapshot};

use super::change::{Source, Swapped, change};
use super::file::Stamp;

/// Interval for checking the configuration while no files are watched.
const ASLEEP: Duration = Duration::from_secs(5);

/// Polls the files until `stop` is cancelled.
pub(crate) async fn watch(backends: Arc<Backends>, stop: CancellationToken) {
    let mut files = HashMap::new();
    loop {
        let interval = backends.config().tables.watch;
        if stop.run_until_cancelled(tokio::time::sleep(interval.unwrap_or(ASLEEP))).await.is_none() {
            return;
        }
        free_replaced(&backends).await;
        if interval.is_none() {
            files.clear();
            continue;
        }
        stop.run_until_cancelled(poll(&backends, &mut files)).await;
    }
}

/// Frees tables and tokenizers whose last request has ended since the last poll.
async fn free_replaced(backends: &Arc<Backends>) {
    if backends.current.holds_replaced() {
        let backends = Arc::clone(backends);
        // If it panics, the runtime reports that.
        let _ = tokio::task::spawn_blocking(move || backends.current.sweep()).await;
    }
}

/// Polls every file once.
async fn poll(backends: &Arc<Backends>, files: &mut HashMap<String, Watched>) {
    let snapshot = backends.snapshot();
    let paths: Vec<(String, PathBuf)> = configured(&snapshot).collect();
    files.retain(|name, _| paths.iter().any(|(known, _)| known == name));
    for (backend, path) in paths {
        // Off the network threads: a network file system may be slow.
        let file = path.clone();
        let Ok(stamp) = tokio::task::spawn_blocking(move || Stamp::of(&file)).await else { continue };
        let probe = snapshot.backend(&backend).and_then(|backend| backend.last_probe());
        let watched = files.entry(backend.clone()).or_insert_with(|| Watched::new(&snapshot, &backend, &path, stamp));
        if watched.path != path {
            *watched = Watched { path: path.clone(), ..Watched::default() };
        }
        if watched.should_load(stamp, probe.as_deref()) {
            let done = change(backends, backend, Source::Watched(path)).await;
            watched.judged(stamp, probe, &done);
        }
    }
}

/// Lists backend names with their tables files.
fn configured(snapshot: &Snapshot) -> impl Iterator<Item = (String, PathBuf)> {
    let backends = snapshot.config.models.iter().flat_map(|model| &model.backends);
    backends.filter_map(|backend| Some((backend.name.clone(), backend.tables.clone()?)))
}

/// Tracks one file.
#[derive(Debug, Default)]
struct Watched {
    path: PathBuf,
    /// The file's state when it was loaded or refused.
    judged: Option<Stamp>,
    /// The file's state at the last poll.
    seen: Option<Stamp>,
    /// The backend's probe report when the file was refused for not matching it, if so. Another engine may match.
    refused: Option<Option<Arc<Probe>>>,
}

impl Watched {
    /// Starts watching a file. Its current state triggers a load only if the tables in use came from an earlier state
    /// of the file, or if it could not be read; otherwise only later changes do.
    fn new(snapshot: &Snapshot, backend: &str, path: &Path, now: Option<Stamp>) -> Self {
        let loaded = snapshot.members().find(|(_, member)| member.backend.name == backend);
        let origin = loaded.and_then(|(_, member)| member.tables.as_ref()).map(|loaded| &loaded.origin);
        let same = origin.filter(|origin| origin.path.as_deref() == Some(path));
        let was_read = loaded.is_some_and(|(_, member)| member.unread.is_none());
        let judged = same.map_or(now.filter(|_| was_read), |origin| origin.stamp);
        Self { path: path.to_owned(), judged, seen: None, refused: None }
    }

    /// Whether to load the file now.
    fn should_load(&mut self, now: Option<Stamp>, probe: Option<&Probe>) -> bool {
        let before = std::mem::replace(&mut self.seen, now);
        match now {
            None => false,
            Some(_) if now == self.judged => self.refused.as_ref().is_some_and(|then| then.as_deref() != probe),
            // Load only if unchanged since the last poll: its writer may not have finished.
            Some(_) => now == before,
        }
    }

    fn judged(&mut self, stamp: Option<Stamp>, probe: Option<Arc<Probe>>, done: &Result<Swapped, RequestError>) {
        self.refused = None;
        self.judged = stamp;
        match done {
            Err(RequestError::TablesRefused { .. }) => self.refused = Some(probe),
            Ok(_) | Err(RequestError::TablesInvalid { .. }) => {}
            // The file is not at fault: retry at the next poll.
            Err(_) => self.judged = None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(name: &str) -> Option<Stamp> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t");
        std::fs::write(&path, name).unwrap();
        Stamp::of(&path)
    }

    fn probe(version: &str) -> Arc<Probe> {
        let dialect = semmoe_engines::Dialect::of(semmoe_engines::Engine::Semmoe, None);
        let version = Some(version.to_owned());
        let placement = Err(semmoe_engines::sglang::Unseen::Unreported);
        Arc::new(Probe {
            server: None,
            version,
            dp_size: None,
            doubt: None,
            dialect,
            unknown_rank_base: false,
            placement,
            max_model_len: None,
            other_model: None,
            rendering: None,
        })
    }

    #[test]
    fn a_file_is_loaded_once_it_rests() {
        let (old, half, whole) = (stamp("old"), stamp("ha"), stamp("whole"));
        let mut watched = Watched { judged: old, ..Watched::default() };
        assert!(!watched.should_load(old, None) && !watched.should_load(old, None));
        assert!(
            !watched.should_load(half, None) && !watched.should_load(whole, None) && !watched.should_load(None, None)
        );
        assert!(!watched.should_load(whole, None) && watched.should_load(whole, None));
        watched.judged(whole, None, &Err(RequestError::TablesInvalid { source: "".into() }));
        assert!(!watched.should_load(whole, None), "what is damaged stays so until it changes");
        assert!(!watched.should_load(old, None) && watched.should_load(old, None));
        watched.judged(old, None, &Err(RequestError::TablesBusy { seconds: 1 }));
        assert!(watched.should_load(old, None), "what was not the file's fault is tried again");
    }

    #[test]
    fn a_refused_file_is_tried_again_for_another_engine() {
        let (now, first, second) = (stamp("now"), probe("1"), probe("2"));
        let mut watched = Watched { judged: None, seen: now, ..Watched::default() };
        assert!(watched.should_load(now, Some(&first)));
        let refused = RequestError::TablesRefused {
            backend: String::new(),
            source: crate::backends::compat::Incompatible::Moving,
        };
        watched.judged(now, Some(Arc::clone(&first)), &Err(refused));
        assert!(!watched.should_load(now, Some(&probe("1"))));
        assert!(watched.should_load(now, Some(&second)));
        let none = String::new;
        let swapped =
            Swapped { backend: none(), generation: 2, digest: none(), placement_digest: none(), changed: true };
        watched.judged(now, Some(second), &Ok(swapped));
        assert!(!watched.should_load(now, Some(&first)));
    }
}
