//! The control plane's state: administration, reloads, discovery and layout switches.

use std::sync::Arc;

use crate::backends::{Backends, Snapshot, WatchedBackends};
use crate::data::DataPlane;
use crate::observe::{Live, Metrics, Tracer};
use crate::shell::reload::outcome::Reloads;
use crate::shell::switching::Records;

/// Everything that changes the backends, apart from the data plane.
pub(crate) struct Control {
    pub(crate) backends: Arc<Backends>,
    pub(crate) data: Arc<DataPlane>,
    pub(crate) live: Arc<Live>,
    /// Units whose layouts the switch policy decides.
    pub(crate) switches: Records,
    pub(crate) reloads: Reloads,
    pub(crate) watched: WatchedBackends,
}

impl Control {
    pub(crate) fn new(snapshot: Snapshot, metrics: Metrics, tracer: Option<Arc<Tracer>>) -> Self {
        let live = Arc::new(Live::new(metrics.live.clone()));
        let switches = Records::new(metrics.switching.clone());
        let backends = Arc::new(Backends::new(snapshot, Arc::new(metrics)));
        Self {
            data: Arc::new(DataPlane::new(Arc::clone(&backends), Arc::clone(&live), tracer)),
            switches,
            reloads: Reloads::default(),
            watched: WatchedBackends::default(),
            backends,
            live,
        }
    }
}
