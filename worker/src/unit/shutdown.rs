//! A request to stop this process, from a signal, standard input or an embedding program.

use std::sync::Arc;

use tokio::sync::watch;

/// A permanent stop request. Clones share it.
#[derive(Clone, Debug)]
pub struct Shutdown(Arc<watch::Sender<bool>>);

impl Default for Shutdown {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }
}

impl Shutdown {
    /// Asks the process to stop gracefully.
    pub fn request(&self) {
        self.0.send_replace(true);
    }

    /// Whether a stop was requested.
    pub fn is_requested(&self) -> bool {
        *self.0.borrow()
    }

    /// Resolves when a stop is requested.
    pub async fn requested(&self) {
        // `self` owns the sender, so waiting cannot fail.
        let _ = self.0.subscribe().wait_for(|requested| *requested).await;
    }
}
