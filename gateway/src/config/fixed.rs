//! Settings that a new configuration inherits from the running one: fixed keys, and discovered backends.

use super::Config;

impl Config {
    /// Copies the settings that cannot change without a restart from the running configuration; returns the keys that
    /// differ.
    pub(crate) fn keep_fixed(&mut self, running: &Self) -> Vec<&'static str> {
        let mut kept = Vec::new();
        keep(&mut kept, "server.listen", &mut self.server.listen, &running.server.listen);
        keep(&mut kept, "server.admin", &mut self.server.admin, &running.server.admin);
        keep(&mut kept, "server.metrics", &mut self.server.metrics, &running.server.metrics);
        // The new file may omit the token for its own address, but the bound address requires one.
        if !running.server.admin.ip().is_loopback() && self.server.admin_token_sha256.is_none() {
            let token = &mut self.server.admin_token_sha256;
            keep(&mut kept, "server.admin_token_sha256", token, &running.server.admin_token_sha256);
        }
        keep(&mut kept, "server.tls", &mut self.server.tls, &running.server.tls);
        keep(&mut kept, "server.admin_tls", &mut self.server.admin_tls, &running.server.admin_tls);
        keep(&mut kept, "limits.handshakes", &mut self.limits.handshakes, &running.limits.handshakes);
        let (new, old) = (&mut self.limits.connections_per_address, &running.limits.connections_per_address);
        keep(&mut kept, "limits.connections_per_address", new, old);
        keep(&mut kept, "limits.connections", &mut self.limits.connections, &running.limits.connections);
        keep(&mut kept, "timeouts.connect_seconds", &mut self.timeouts.connect, &running.timeouts.connect);
        // Open profiles keep their file and their limits.
        keep(&mut kept, "sampling.profile_*", &mut self.sampling.profile, &running.sampling.profile);
        keep(&mut kept, "log", &mut self.log, &running.log);
        keep(&mut kept, "tracing", &mut self.tracing, &running.tracing);
        kept
    }

    /// Inherits the backends discovered so far from unchanged sources.
    pub(crate) fn keep_found(&mut self, running: &Self) {
        for model in &mut self.models {
            let Some(was) = running.models.iter().find(|was| was.name == model.name) else { continue };
            for source in model.discovery.clone() {
                if was.discovery.iter().any(|was| (&was.name, &was.place) == (&source.name, &source.place)) {
                    model.set_found(&source.name, was.found(&source.name).collect::<Vec<_>>());
                }
            }
        }
    }
}

fn keep<T: Clone + PartialEq>(kept: &mut Vec<&'static str>, key: &'static str, new: &mut T, running: &T) {
    if new != running {
        kept.push(key);
        new.clone_from(running);
    }
}
