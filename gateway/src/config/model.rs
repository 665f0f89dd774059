//! A validated model: its names, policy and backends, both configured and discovered.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;

use super::{BackendConfig, DiscoveryConfig};

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ModelConfig {
    pub(crate) name: String,
    pub(crate) other_names: OtherNames,
    pub(crate) tokenizer: Option<PathBuf>,
    pub(crate) chat_template: Option<PathBuf>,
    /// UTC offset of the engines' clocks.
    pub(crate) zone_seconds: i32,
    pub(crate) chat_options: semmoe_text::ChatOptions,
    pub(crate) policy: PolicyConfig,
    /// Configured backends, followed by the discovered ones.
    pub(crate) backends: Vec<BackendConfig>,
    pub(crate) discovery: Vec<DiscoveryConfig>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PolicyConfig {
    pub(crate) name: String,
    /// Policy parameters, including the model's own baseline.
    pub(crate) settings: semmoe_routing::Settings,
    pub(crate) canary: Option<semmoe_routing::Canary>,
    /// Union of the policies' inputs. A canary scores every request, so that both arms can be compared.
    pub(crate) needs: semmoe_routing::Needs,
}

/// A model's names other than its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct OtherNames {
    pub(crate) aliases: Vec<String>,
    /// LoRA adapters that requests may name; `None` allows any.
    pub(crate) adapters: Option<Vec<String>>,
}

impl ModelConfig {
    /// Returns the addresses of a source's backends.
    pub(crate) fn found<'a>(&'a self, source: &'a str) -> impl Iterator<Item = SocketAddr> + 'a {
        let found = self.backends.iter().filter_map(|backend| backend.found.as_ref());
        found.filter(move |found| found.source == source).map(|found| found.address)
    }

    /// Replaces a source's backends with those at these addresses. Discovered backends follow the configured ones,
    /// ordered by source and address, so that every gateway uses the same order.
    pub(crate) fn set_found(&mut self, source: &str, addresses: impl IntoIterator<Item = SocketAddr>) {
        let mut new: Option<BTreeSet<SocketAddr>> = Some(addresses.into_iter().collect());
        let mut found = Vec::new();
        for known in &self.discovery {
            let named = new.take_if(|_| known.name == source);
            let addresses = named.unwrap_or_else(|| self.found(&known.name).collect());
            found.extend(addresses.into_iter().map(|address| known.backend(address)));
        }
        self.backends.retain(|backend| backend.found.is_none());
        // A configured backend may already use one of these names.
        let taken: Vec<String> = self.backends.iter().map(|backend| backend.name.clone()).collect();
        self.backends.extend(found.into_iter().filter(|backend| !taken.contains(&backend.name)));
    }
}
