//! `[[models.discovery]]`: backends that are found by name, and come and go while the gateway runs.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use semmoe_engines::RankBase;
use serde::Deserialize;

use super::validate::seconds;
use super::{BackendConfig, Config, ConfigError, ModelConfig, RawBackend};

/// A name of the DNS is no longer.
const LONGEST_HOST_BYTES: usize = 253;

/// `[[models.discovery]]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawDiscovery {
    /// Its backends are named `NAME-ADDRESS:PORT`; unique among backends.
    pub name: String,
    /// `host:port`: every address (A and AAAA) of the host is a backend on that port.
    pub dns: String,
    /// `sglang`, `vllm`, `semmoe` or `openai`; this and what follows is as in `[[models.backends]]`, the same for all of them.
    pub engine: String,
    /// Tables of the placement that all of them run.
    #[serde(default)]
    pub tables: Option<PathBuf>,
    /// Attention-DP ranks of each; absent: probed.
    #[serde(default)]
    pub ranks: Option<u16>,
    /// Digest of the placement that all of them run.
    #[serde(default)]
    pub placement_digest: Option<String>,
    /// How each counts its ranks in pins.
    #[serde(default)]
    pub rank_base: Option<RankBase>,
    /// File with the key that all of them want.
    #[serde(default)]
    pub api_key_file: Option<PathBuf>,
    /// Time between two looks.
    #[serde(default = "default_interval_seconds")]
    pub interval_seconds: f64,
    /// Answers in a row that an address must be missing from before its backend leaves.
    #[serde(default = "default_leave_after")]
    pub leave_after: u32,
}

fn default_interval_seconds() -> f64 {
    5.0
}

fn default_leave_after() -> u32 {
    3
}

impl RawDiscovery {
    /// What any of its backends would be, at an address that is made up.
    fn template(&self) -> RawBackend {
        RawBackend {
            name: self.name.clone(),
            engine: self.engine.clone(),
            url: "http://127.0.0.1:1".to_owned(),
            tables: self.tables.clone(),
            ranks: self.ranks,
            placement_digest: self.placement_digest.clone(),
            rank_base: self.rank_base,
            api_key_file: self.api_key_file.clone(),
            ..RawBackend::default()
        }
    }
}

/// Checked.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DiscoveryConfig {
    pub(crate) name: String,
    /// `host:port`.
    pub(crate) dns: String,
    pub(crate) interval: Duration,
    pub(crate) leave_after: u32,
    template: BackendConfig,
}

/// By what a backend was found, and where.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Found {
    pub(crate) source: String,
    pub(crate) address: SocketAddr,
}

impl DiscoveryConfig {
    /// The backend at an address.
    pub(crate) fn backend(&self, address: SocketAddr) -> BackendConfig {
        BackendConfig {
            name: format!("{}-{address}", self.name),
            urls: vec![address.into()],
            found: Some(Found { source: self.name.clone(), address }),
            ..self.template.clone()
        }
    }
}

/// `backend` judges what is common to all backends.
pub(super) fn discovery(
    key: &str,
    raw: &RawDiscovery,
    backend: impl FnOnce(RawBackend) -> Result<BackendConfig, ConfigError>,
) -> Result<DiscoveryConfig, ConfigError> {
    let wrong = || ConfigError::value(format!("{key}.dns"), format!("'{}' is not host:port", raw.dns));
    let (host, port) = raw.dns.rsplit_once(':').ok_or_else(wrong)?;
    let is_host = !host.is_empty() && host.len() <= LONGEST_HOST_BYTES && !host.contains(['/', ' ', ':', '@']);
    if !is_host || !port.parse::<u16>().is_ok_and(|port| port > 0) {
        return Err(wrong());
    }
    if raw.leave_after == 0 {
        return Err(ConfigError::value(format!("{key}.leave_after"), "0, expected at least 1"));
    }
    Ok(DiscoveryConfig {
        name: raw.name.clone(),
        dns: raw.dns.clone(),
        interval: seconds(&format!("{key}.interval_seconds"), raw.interval_seconds)?,
        leave_after: raw.leave_after,
        template: backend(raw.template())?,
    })
}

impl ModelConfig {
    /// Where the backends of a source are.
    pub(crate) fn found<'a>(&'a self, source: &'a str) -> impl Iterator<Item = SocketAddr> + 'a {
        let found = self.backends.iter().filter_map(|backend| backend.found.as_ref());
        found.filter(move |found| found.source == source).map(|found| found.address)
    }

    /// Makes the backends of a source those at these addresses. Found backends stand behind the configured ones, source after
    /// source, by address: in the same order in every gateway.
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

impl Config {
    /// Takes over what was found so far from the running configuration, where the same sources are asked.
    pub(crate) fn keep_found(&mut self, running: &Self) {
        for model in &mut self.models {
            let Some(was) = running.models.iter().find(|was| was.name == model.name) else { continue };
            for source in model.discovery.clone() {
                if was.discovery.iter().any(|was| (&was.name, &was.dns) == (&source.name, &source.dns)) {
                    model.set_found(&source.name, was.found(&source.name).collect::<Vec<_>>());
                }
            }
        }
    }
}
