//! The tasks that watch each backend: one set for every backend of the current snapshot, and none for others.

use std::sync::{Arc, Mutex, PoisonError};

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::backend::Watched;
use crate::snapshot::Snapshot;
use crate::state::Core;
use crate::{health, pins, switching};

/// The running tasks.
#[derive(Default)]
pub(crate) struct Watchers {
    tasks: TaskTracker,
    /// Ends all of them.
    stop: CancellationToken,
    watched: Mutex<Vec<Watched>>,
}

impl Watchers {
    /// Begins to watch the backends that are new in this snapshot, and ends watching those that are not in it.
    pub(crate) fn follow(&self, core: &Arc<Core>, snapshot: &Snapshot) {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        watched.retain(|it| {
            let stays = snapshot.position(&it.backend).is_some();
            if !stays {
                it.stop.cancel();
            }
            stays
        });
        for (_, member) in snapshot.members() {
            let backend = &member.backend;
            if watched.iter().any(|it| Arc::ptr_eq(&it.backend, backend)) {
                continue;
            }
            let new = Watched { backend: Arc::clone(backend), stop: self.stop.child_token() };
            self.tasks.spawn(pins::watch(Arc::clone(core), new.clone()));
            self.tasks.spawn(health::watch(Arc::clone(core), new.clone()));
            self.tasks.spawn(switching::watch(Arc::clone(core), new.clone()));
            watched.push(new);
        }
    }

    /// Ends all of them, also those that begin later.
    pub(crate) async fn stop(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}
