//! The tasks that watch each backend: one set for every backend of the current snapshot, and none for others.

use std::sync::{Arc, PoisonError};

use crate::backend::{Watched, WatchedBackends};
use crate::snapshot::Snapshot;
use crate::state::Core;
use crate::{health, pins, switching};

/// Begins to watch the backends that are new in this snapshot, and ends watching those that are not in it.
pub(crate) fn follow(core: &Arc<Core>, snapshot: &Snapshot) {
    let WatchedBackends { tasks, stop, backends } = &core.watched;
    let mut watched = backends.lock().unwrap_or_else(PoisonError::into_inner);
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
        let new = Watched { backend: Arc::clone(backend), stop: stop.child_token() };
        tasks.spawn(pins::watch(Arc::clone(core), new.clone()));
        tasks.spawn(health::watch(Arc::clone(core), new.clone()));
        tasks.spawn(switching::watch(Arc::clone(core), new.clone()));
        watched.push(new);
    }
}

/// Ends all of them, also those that begin later.
pub(crate) async fn stop(core: &Core) {
    let WatchedBackends { tasks, stop, .. } = &core.watched;
    stop.cancel();
    tasks.close();
    tasks.wait().await;
}
