//! Backends that are found by name, while the gateway runs: `[[models.discovery]]`.
//!
//! A source is asked again and again. An address that is new in an answer becomes a backend once it answered a probe that
//! fits; one that is missing leaves after it was missing from several answers in a row, so that answers which leave some out
//! in turn do no harm. A failed or empty answer changes nothing and is counted. What joins and leaves goes the way of a reload:
//! everything else stays as it is, running requests end where they are.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::config::{Config, DiscoveryConfig};
use crate::reload;
use crate::state::Core;

/// Longest wait for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The configuration is looked at so often at least, as it may name other sources.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);
/// Most backends of one source: what a resolver answers comes from outside.
const MOST_FOUND: usize = 1024;

/// How names become addresses.
pub trait Resolve: Send + Sync {
    /// All addresses of `host:port`.
    fn resolve(&self, name: String) -> Resolved<'_>;
}

/// Addresses, or why there are none.
pub type Resolved<'a> = Pin<Box<dyn Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'a>>;

/// The operating system's resolver: A and AAAA records, and `/etc/hosts`.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve(&self, name: String) -> Resolved<'_> {
        Box::pin(async move { Ok(tokio::net::lookup_host(name).await?.collect()) })
    }
}

/// A model's name and a source's.
pub(crate) type Key = (String, String);

/// What is remembered of one source.
struct Source {
    next: Instant,
    /// Answers in a row that an address was missing from.
    missing: HashMap<SocketAddr, u32>,
    /// Addresses that were left out, and told.
    left_out: BTreeMap<String, String>,
    failing: bool,
}

/// Asks the sources until `stop`.
pub(crate) async fn watch(core: Arc<Core>, resolver: Arc<dyn Resolve>, stop: CancellationToken) {
    let mut sources: HashMap<Key, Source> = HashMap::new();
    loop {
        let config = core.config();
        let due = due(&config, &mut sources);
        tokio::select! {
            () = stop.cancelled() => return,
            () = look(&core, resolver.as_ref(), &due, &mut sources) => {}
        }
        let next = sources.values().map(|source| source.next).min();
        let longest = Instant::now() + LONGEST_SLEEP;
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep_until(next.map_or(longest, |next| next.min(longest))) => {}
        }
    }
}

/// The sources whose time has come; those that are no more are forgotten.
fn due(config: &Config, sources: &mut HashMap<Key, Source>) -> Vec<(Key, DiscoveryConfig)> {
    let now = Instant::now();
    let all = config.models.iter().flat_map(|model| {
        model.discovery.iter().map(|source| ((model.name.clone(), source.name.clone()), source.clone()))
    });
    let all: Vec<(Key, DiscoveryConfig)> = all.collect();
    sources.retain(|key, _| all.iter().any(|(known, _)| known == key));
    let mut due = Vec::new();
    for (key, config) in all {
        let first = || Source { next: now, missing: HashMap::new(), left_out: BTreeMap::new(), failing: false };
        let source = sources.entry(key.clone()).or_insert_with(first);
        if source.next <= now {
            source.next = now + config.interval;
            due.push((key, config));
        }
    }
    due
}

/// Asks all that are due, and brings into force what they say.
async fn look(
    core: &Arc<Core>,
    resolver: &dyn Resolve,
    due: &[(Key, DiscoveryConfig)],
    sources: &mut HashMap<Key, Source>,
) {
    let ask = due.iter().map(|(_, source)| tokio::time::timeout(ANSWER_TIMEOUT, resolver.resolve(source.dns.clone())));
    let answers = join_all(ask).await;
    let running = core.config();
    let mut changes: HashMap<Key, Vec<SocketAddr>> = HashMap::new();
    for ((key, config), answer) in due.iter().zip(answers) {
        let Some(source) = sources.get_mut(key) else { continue };
        let answer = answer.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        let Some(addresses) = note(core, config, source, answer) else { continue };
        let Some(model) = running.models.iter().find(|model| model.name == key.0) else { continue };
        let current: BTreeSet<SocketAddr> = model.found(&key.1).collect();
        let wanted = source.wanted(&current, &addresses, config.leave_after);
        if wanted != current {
            changes.insert(key.clone(), wanted.into_iter().collect());
        }
    }
    if !changes.is_empty() {
        apply(core, changes, sources).await;
    }
    let config = core.config();
    for ((model, source), _) in due {
        let model = config.models.iter().find(|it| it.name == *model);
        core.metrics.operation.discovered(source, model.map_or(0, |model| model.found(source).count()));
    }
}

async fn apply(core: &Arc<Core>, changes: HashMap<Key, Vec<SocketAddr>>, sources: &mut HashMap<Key, Source>) {
    let keys: Vec<Key> = changes.keys().cloned().collect();
    let done = reload::rediscover(core, changes).await;
    match done {
        Ok((changed, left_out)) => {
            if !(changed.backends_added.is_empty() && changed.backends_removed.is_empty()) {
                let (joined, left) = (&changed.backends_added, &changed.backends_removed);
                tracing::info!(generation = changed.generation, ?joined, ?left, "backends discovered");
            }
            for key in keys {
                let Some(source) = sources.get_mut(&key) else { continue };
                let prefix = format!("{}-", key.1);
                let of_source = left_out.iter().filter(|(backend, _)| backend.starts_with(&prefix));
                let of_source: BTreeMap<String, String> = of_source.cloned().collect();
                for (backend, cause) in
                    of_source.iter().filter(|(name, cause)| source.left_out.get(*name) != Some(cause))
                {
                    tracing::warn!(backend, cause, "discovered, but it gets no requests before it answers and fits");
                }
                source.left_out = of_source;
            }
        }
        Err(error) => tracing::warn!(%error, "what was discovered is not in force"),
    }
}

/// Counts an answer; returns its addresses where it is one to go by.
fn note(
    core: &Core,
    config: &DiscoveryConfig,
    source: &mut Source,
    answer: io::Result<Vec<SocketAddr>>,
) -> Option<BTreeSet<SocketAddr>> {
    let (outcome, cause, addresses) = match answer {
        Err(error) => ("failed", Some(error.to_string()), None),
        Ok(addresses) if addresses.is_empty() => ("empty", Some("no addresses".to_owned()), None),
        Ok(addresses) => {
            let addresses: BTreeSet<SocketAddr> = addresses.into_iter().collect();
            let too_many = addresses.len().saturating_sub(MOST_FOUND);
            let cause = (too_many > 0).then(|| format!("{too_many} more addresses than {MOST_FOUND} are left out"));
            let outcome = if too_many > 0 { "too_many" } else { "ok" };
            (outcome, cause, Some(addresses.into_iter().take(MOST_FOUND).collect()))
        }
    };
    core.metrics.operation.discovery_answer(&config.name, outcome);
    // The first of a row.
    if let Some(cause) = cause.filter(|_| !source.failing) {
        tracing::warn!(source = config.name, dns = config.dns, cause, "discovery: the backends stay as they are");
    }
    source.failing = outcome != "ok";
    addresses
}

impl Source {
    /// Those that are there, and those that were there until lately.
    fn wanted(
        &mut self,
        current: &BTreeSet<SocketAddr>,
        answer: &BTreeSet<SocketAddr>,
        leave_after: u32,
    ) -> BTreeSet<SocketAddr> {
        self.missing.retain(|address, _| current.contains(address) && !answer.contains(address));
        let mut wanted = answer.clone();
        for address in current.difference(answer) {
            let times = self.missing.entry(*address).or_default();
            *times += 1;
            if *times < leave_after {
                wanted.insert(*address);
            }
        }
        wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(ports: &[u16]) -> BTreeSet<SocketAddr> {
        ports.iter().map(|port| SocketAddr::from(([10, 0, 0, 1], *port))).collect()
    }

    #[test]
    fn addresses_leave_after_they_were_missing_in_a_row() {
        let mut source =
            Source { next: Instant::now(), missing: HashMap::new(), left_out: BTreeMap::new(), failing: false };
        let both = addresses(&[1, 2]);
        for (answer, expected) in [
            (&[1, 2][..], &[1, 2][..]),
            (&[1], &[1, 2]),
            (&[1], &[1, 2]),
            (&[1, 2], &[1, 2]),
            (&[2], &[1, 2]),
            (&[2, 3], &[1, 2, 3]),
            (&[2, 3], &[2, 3]),
        ] {
            assert_eq!(source.wanted(&both, &addresses(answer), 3), addresses(expected), "{answer:?}");
        }
        assert_eq!(source.wanted(&both, &addresses(&[1]), 1), addresses(&[1]));
    }
}
