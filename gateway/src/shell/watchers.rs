//! The tasks that watch backends: one set for each backend of the current snapshot, and none for others.

use std::sync::{Arc, PoisonError};

use crate::backends::{Snapshot, Watched, WatchedBackends, health, pins};
use crate::shell::control::Control;
use crate::shell::switching;

/// Starts watching the backends that are new in this snapshot, and stops watching those that have left it.
pub(crate) fn follow(control: &Arc<Control>, snapshot: &Snapshot) {
    let WatchedBackends { tasks, stop, backends } = &control.watched;
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
        tasks.spawn(pins::watch(Arc::clone(&control.backends), new.clone()));
        tasks.spawn(health::watch(Arc::clone(&control.backends), new.clone()));
        tasks.spawn(switching::watch(Arc::clone(control), new.clone()));
        watched.push(new);
    }
}

/// Stops all watchers, including any that would start later.
pub(crate) async fn stop(control: &Control) {
    let WatchedBackends { tasks, stop, .. } = &control.watched;
    stop.cancel();
    tasks.close();
    tasks.wait().await;
}
