//! Engines that answer with exactly the bytes that a test chose.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use semmoe_mock_engine::{RawRequest, Wire, document, send};

/// An engine on loopback.
pub(crate) struct Engine {
    pub(crate) address: SocketAddr,
    seen: Arc<Mutex<Vec<RawRequest>>>,
    _wire: Wire,
}

impl Engine {
    /// Answers each POST with these bytes; probes with an empty object.
    pub(crate) fn start(answer: &[u8]) -> Self {
        let (seen, answer) = (Arc::<Mutex<Vec<RawRequest>>>::default(), answer.to_vec());
        let to = Arc::clone(&seen);
        let wire = Wire::start(move |request| {
            let is_probe = ["/v1/models", "/health"].contains(&request.path());
            if !is_probe {
                to.lock().unwrap().push(request);
            }
            std::future::ready(send(if is_probe { document("", "{}") } else { answer.clone() }))
        });
        Self { address: wire.address, seen, _wire: wire }
    }

    /// Answers `{}`.
    pub(crate) fn honest() -> Self {
        Self::start(&document("", "{}"))
    }

    /// The requests so far, without probes.
    pub(crate) fn seen(&self) -> Vec<RawRequest> {
        self.seen.lock().unwrap().clone()
    }
}
