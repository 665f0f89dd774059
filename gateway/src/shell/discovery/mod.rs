//! Backends discovered by name while the gateway runs: `[[models.discovery]]`.
//!
//! Sources are polled. A new address becomes a backend once it has answered a probe and matches the configuration. An
//! absent address is removed after several consecutive answers without it, so that answers that alternately omit
//! addresses do no harm, or at once if the answer reports that its engine is terminating. A failed or empty answer
//! changes nothing and is counted. Backends join and leave as in a reload: everything else is unaffected, and running
//! requests finish where they are.

mod answer;
#[cfg(feature = "kube")]
mod kubernetes;
mod srv;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::config::{Config, DiscoveryConfig, Place, SourceKey};
use crate::shell::control::Control;
use crate::shell::reload;

use answer::{Answer, Lookup, LookupError, MAX_FOUND};
pub use answer::{Resolve, Resolved, SystemResolver};

/// Maximum interval between checks of the configuration, which may name new sources.
const MAX_SLEEP: Duration = Duration::from_secs(1);

/// The state of one source.
struct Source {
    place: Place,
    lookup: Lookup,
    next: Instant,
    /// Number of consecutive polls that lacked an address.
    missing: HashMap<SocketAddr, u32>,
    /// Addresses left out, with the cause as logged.
    left_out: BTreeMap<String, String>,
    /// Describes the unused part of the last answer.
    note: Option<String>,
    failing: bool,
}

impl Source {
    fn new(place: &Place, wake: &Arc<Notify>) -> Self {
        Self {
            place: place.clone(),
            lookup: Lookup::new(place, wake),
            next: Instant::now(),
            missing: HashMap::new(),
            left_out: BTreeMap::new(),
            note: None,
            failing: false,
        }
    }
}

type Sources = HashMap<SourceKey, Source>;

/// A source that is due for a poll.
struct Due {
    key: SourceKey,
    config: DiscoveryConfig,
    /// Whether the source is due by its polling interval, rather than because a followed answer changed.
    in_turn: bool,
}

/// Polls the sources until `stop` is cancelled.
pub(crate) async fn watch(control: Arc<Control>, resolver: Arc<dyn Resolve>, stop: CancellationToken) {
    let mut sources: Sources = HashMap::new();
    let wake = Arc::new(Notify::new());
    loop {
        let config = control.backends.config();
        forget_gone(&control, &config, &mut sources);
        let due = due(&config, &mut sources, &wake);
        stop.run_until_cancelled(resolve_due(&control, resolver.as_ref(), &due, &mut sources)).await;
        let next = sources.values().map(|source| source.next).min();
        let longest = Instant::now() + MAX_SLEEP;
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep_until(next.map_or(longest, |next| next.min(longest))) => {}
            () = wake.notified() => {}
        }
    }
}

/// Forgets sources that were removed or now use another server; otherwise their gauges would trigger alarms forever.
fn forget_gone(control: &Control, config: &Config, sources: &mut Sources) {
    let stays = |key: &SourceKey, source: &Source| {
        let model = config.models.iter().find(|it| it.name == key.model);
        model.is_some_and(|model| model.discovery.iter().any(|it| it.name == key.source && it.place == source.place))
    };
    sources.retain(|key, source| {
        let stays = stays(key, source);
        if !stays {
            control.backends.metrics.operation.forget_source(&key.source);
        }
        stays
    });
}

/// Returns the sources that are due for a poll.
fn due(config: &Config, sources: &mut Sources, wake: &Arc<Notify>) -> Vec<Due> {
    let now = Instant::now();
    let mut due = Vec::new();
    for model in &config.models {
        for config in &model.discovery {
            let key = SourceKey { model: model.name.clone(), source: config.name.clone() };
            let source = sources.entry(key.clone()).or_insert_with(|| Source::new(&config.place, wake));
            let (in_turn, changed) = (source.next <= now, source.lookup.changed());
            if in_turn {
                source.next = now + config.interval;
            }
            if in_turn || changed {
                due.push(Due { key, config: config.clone(), in_turn });
            }
        }
    }
    due
}

/// Polls all sources that are due, and applies their answers.
async fn resolve_due(control: &Arc<Control>, resolver: &dyn Resolve, due: &[Due], sources: &mut Sources) {
    let all = due.iter().map(|it| sources.get(&it.key).map(|source| source.lookup.answer(resolver, &it.config.place)));
    let answers = join_all(all.map(|answer| async { answer?.await })).await;
    let running = control.backends.config();
    let mut changes: HashMap<SourceKey, Vec<SocketAddr>> = HashMap::new();
    for (Due { key, config, in_turn }, answer) in due.iter().zip(answers) {
        let (Some(source), Some(answer)) = (sources.get_mut(key), answer) else { continue };
        let Some(answer) = note(control, config, source, answer) else { continue };
        let Some(model) = running.models.iter().find(|model| model.name == key.model) else { continue };
        let current: BTreeSet<SocketAddr> = model.found(&key.source).collect();
        let wanted = source.wanted(&current, &answer, *in_turn && answer.gaps.is_none(), config.leave_after);
        if wanted != current {
            changes.insert(key.clone(), wanted.into_iter().collect());
        }
    }
    if !changes.is_empty() {
        apply(control, changes, sources).await;
    }
    let config = control.backends.config();
    for Due { key: SourceKey { model, source }, .. } in due {
        let model = config.models.iter().find(|it| it.name == *model);
        control.backends.metrics.operation.discovered(source, model.map_or(0, |model| model.found(source).count()));
    }
}

async fn apply(control: &Arc<Control>, changes: HashMap<SourceKey, Vec<SocketAddr>>, sources: &mut Sources) {
    let keys: Vec<SourceKey> = changes.keys().cloned().collect();
    let done = reload::rediscover(control, changes).await;
    match done {
        Ok((changed, left_out)) => {
            if !(changed.backends_added.is_empty() && changed.backends_removed.is_empty()) {
                let (joined, left) = (&changed.backends_added, &changed.backends_removed);
                tracing::info!(generation = changed.generation, ?joined, ?left, "backends discovered");
            }
            for key in keys {
                let Some(source) = sources.get_mut(&key) else { continue };
                let prefix = format!("{}-", key.source);
                let of_source = left_out.iter().filter(|(backend, _)| backend.starts_with(&prefix));
                let of_source: BTreeMap<String, String> = of_source.cloned().collect();
                for (backend, cause) in
                    of_source.iter().filter(|(name, cause)| source.left_out.get(*name) != Some(cause))
                {
                    tracing::warn!(backend, cause, "discovered backend gets no requests until it answers and matches");
                }
                source.left_out = of_source;
            }
        }
        Err(error) => tracing::warn!(%error, "could not apply the discovered backends"),
    }
}

/// Counts an answer; returns it if it is usable.
fn note(
    control: &Control,
    config: &DiscoveryConfig,
    source: &mut Source,
    answer: Result<Answer, LookupError>,
) -> Option<Answer> {
    let (outcome, cause, answer) = match answer {
        Err(error) => ("failed", Some(error.to_string()), None),
        Ok(answer) if answer.addresses.is_empty() => ("empty", Some("no addresses".to_owned()), None),
        Ok(mut answer) => {
            let too_many = answer.addresses.len().saturating_sub(MAX_FOUND);
            let cause = (too_many > 0).then(|| format!("{too_many} addresses beyond {MAX_FOUND} are left out"));
            let outcome = match (&cause, &answer.gaps) {
                (Some(_), _) => "too_many",
                (None, Some(_)) => "incomplete",
                (None, None) => "ok",
            };
            answer.addresses = answer.addresses.into_iter().take(MAX_FOUND).collect();
            source.log_note(config, answer.note.as_deref());
            (outcome, cause.or_else(|| answer.gaps.clone()), Some(answer))
        }
    };
    control.backends.metrics.operation.discovery_answer(&config.name, outcome, answer.is_none());
    // Log only the first failure of a series.
    if let Some(cause) = cause.filter(|_| !source.failing) {
        let what = if answer.is_some() { "some backends may be missing" } else { "the backends are unchanged" };
        tracing::warn!(source = config.name, place = %config.place, cause, "discovery: {what}");
    }
    if source.failing && outcome == "ok" {
        tracing::info!(source = config.name, place = %config.place, "discovery works again");
    }
    source.failing = outcome != "ok";
    answer
}

impl Source {
    /// Logs the unused part of an answer once.
    fn log_note(&mut self, config: &DiscoveryConfig, note: Option<&str>) {
        if let Some(note) = note.filter(|note| self.note.as_deref() != Some(note)) {
            tracing::info!(source = config.name, place = %config.place, note, "discovery");
        }
        self.note = note.map(str::to_owned);
    }

    /// Returns the addresses in the answer, plus those that have been absent only briefly. Only polls that are
    /// `in_turn` count towards `leave_after`.
    fn wanted(
        &mut self,
        current: &BTreeSet<SocketAddr>,
        answer: &Answer,
        in_turn: bool,
        leave_after: u32,
    ) -> BTreeSet<SocketAddr> {
        let Answer { addresses, leaving, .. } = answer;
        self.missing.retain(|address, _| current.contains(address) && !addresses.contains(address));
        let mut wanted = addresses.clone();
        for address in current.difference(addresses) {
            let times = self.missing.entry(*address).or_default();
            *times += u32::from(in_turn);
            if *times < leave_after && !leaving.contains(address) {
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

    fn answer(ports: &[u16], leaving: &[u16]) -> Answer {
        Answer { addresses: addresses(ports), leaving: addresses(leaving), ..Answer::default() }
    }

    fn source() -> Source {
        Source::new(&Place::Dns("engines:1".to_owned()), &Arc::default())
    }

    #[test]
    fn addresses_leave_after_they_were_missing_in_a_row() {
        let mut source = source();
        let both = addresses(&[1, 2]);
        for (ports, expected) in [
            (&[1, 2][..], &[1, 2][..]),
            (&[1], &[1, 2]),
            (&[1], &[1, 2]),
            (&[1, 2], &[1, 2]),
            (&[2], &[1, 2]),
            (&[2, 3], &[1, 2, 3]),
            (&[2, 3], &[2, 3]),
        ] {
            assert_eq!(source.wanted(&both, &answer(ports, &[]), true, 3), addresses(expected), "{ports:?}");
        }
        assert_eq!(source.wanted(&both, &answer(&[1], &[]), true, 1), addresses(&[1]));
    }

    #[test]
    fn looks_out_of_turn_make_nobody_leave_and_who_is_said_to_end_leaves_at_once() {
        let mut source = source();
        let all = addresses(&[1, 2, 3]);
        for _ in 0..9 {
            assert_eq!(source.wanted(&all, &answer(&[1], &[]), false, 2), all);
        }
        assert_eq!(source.wanted(&all, &answer(&[1], &[3]), false, 2), addresses(&[1, 2]));
        assert_eq!(source.wanted(&addresses(&[1, 2]), &answer(&[1], &[3]), true, 2), addresses(&[1, 2]));
        assert_eq!(source.wanted(&addresses(&[1, 2]), &answer(&[1], &[]), true, 2), addresses(&[1]));
    }
}
