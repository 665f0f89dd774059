//! A model as it was checked: its names, policy and backends, configured and found.

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
    /// The engines' clocks are so far ahead of UTC.
    pub(crate) zone_seconds: i32,
    pub(crate) chat_options: semmoe_text::ChatOptions,
    pub(crate) policy: PolicyConfig,
    /// Configured ones, and behind them those that were found.
    pub(crate) backends: Vec<BackendConfig>,
    pub(crate) discovery: Vec<DiscoveryConfig>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PolicyConfig {
    pub(crate) name: String,
    /// With the model's own baseline.
    pub(crate) settings: semmoe_routing::Settings,
    pub(crate) canary: Option<semmoe_routing::Canary>,
    /// The inputs that any of them reads. With a canary all requests are scored, so that both sides can be compared.
    pub(crate) needs: semmoe_routing::Needs,
}

/// The names of a model besides its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct OtherNames {
    pub(crate) aliases: Vec<String>,
    /// LoRA adapters that requests may name; `None`: any.
    pub(crate) adapters: Option<Vec<String>>,
}

impl ModelConfig {
    /// Where the backends of a source are.
    pub(crate) fn found<'a>(&'a self, source: &'a str) -> impl Iterator<Item = SocketAddr> + 'a {
        let found = self.backends.iter().filter_map(|backend| backend.found.as_ref());
        found.filter(move |found| found.source == source).map(|found| found.address)
    }

    /// Makes the backends of a source those at these addresses. Found backends stand behind the configured ones, source
    /// after source, by address: in the same order in every gateway.
    pub(crate) fn set_found(&mut self, source: &str, addresses: impl IntoIterator<Item = SocketAddr>) {
        let mut new: Option<BTreeSet<SocketAddr>> = Some(addresses.into_iter().collect());
        let mut found = Vec::new();
        for known in &self.discovery {
            let named = new.take_if(|_| known.name == source);
            let addresses = named.unwrap_or_else(|| self.found(&known.name).collect());
            found.extend(addresses.into_iter().map(|address| known.backend(address)));
        }
        self.backends.retain(|backend| backend.found.is_none());
        // An operator may have given one of these names to another one.
        let taken: Vec<String> = self.backends.iter().map(|backend| backend.name.clone()).collect();
        self.backends.extend(found.into_iter().filter(|backend| !taken.contains(&backend.name)));
    }
}
