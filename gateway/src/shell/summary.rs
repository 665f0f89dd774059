//! The summary printed by `semmoe serve --check`.

use std::fmt;

use semmoe_engines::sglang::ServerInfo;
use semmoe_engines::verify::Pins;

use crate::backends::parity::known::Known;
use crate::backends::{Member, Model, Snapshot};
use crate::config::{Config, OtherNames};

/// A summary with one line per listener, model and backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    lines: Vec<String>,
}

/// The models that a gateway would serve, with their engines' reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probed {
    /// The models that would be served.
    pub served: Summary,
    /// The problems with engines.
    pub troubles: Troubles,
}

/// One sentence per engine that does not serve as configured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Troubles(pub(crate) Vec<String>);

impl Troubles {
    /// Whether all engines serve as configured.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Troubles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("; "))
    }
}

impl std::error::Error for Troubles {}

/// Lists what prevents backends from being routed by affinity, according to files, configuration and the last probes:
/// one sentence per model or backend, for `--check` and `/readyz`.
pub(crate) fn misfits(snapshot: &Snapshot) -> Vec<String> {
    let mut misfits = Vec::new();
    for model in &snapshot.models {
        if let Some(unread) = &model.unread {
            let follows = if unread.earlier_in_use { "the earlier one stays in use" } else { "routed by load" };
            misfits.push(format!("model '{}': {} ({follows})", model.name, unread.error));
        }
        let text = model.text.as_ref();
        if let Some((text, error)) = text.and_then(|text| Some((text, text.template_error.as_ref()?))) {
            let follows =
                if text.template.is_some() { "the earlier one stays in use" } else { "chats are routed by load" };
            misfits.push(format!("model '{}': its chat template cannot be used: {error} ({follows})", model.name));
        }
        for member in &model.members {
            let stale = member.unread.as_ref().filter(|_| member.tables.is_some());
            let stale = stale.map(|unread| format!("{} (the earlier tables stay in use)", unread.error));
            // Already reported for the model.
            let affinity = model.unread.as_ref().is_none_or(|unread| unread.earlier_in_use);
            let by_load =
                member.fit.unpinned.as_ref().filter(|_| affinity).map(|why| format!("{why} (routed by load)"));
            let misread = misread(member);
            let causes = by_load.or(stale).into_iter().chain(misread);
            misfits.extend(causes.map(|cause| format!("backend '{}': {cause}", member.backend.name)));
        }
    }
    misfits
}

/// Describes how an engine's tokenization of chats differs from the gateway's.
fn misread(member: &Member) -> Option<String> {
    let known = Known::of(member);
    let detail = known.detail(member).unwrap_or_default();
    (!known.differs.is_empty())
        .then(|| format!("it tokenizes these chat shapes differently: {}; {detail} (routed by load)", known.differs))
}

/// Returns why requests to a live backend would not run where they are sent, if so.
pub(crate) fn ignored_pins(member: &Member) -> Option<String> {
    let pins = member.backend.pins.state();
    let state = pins.summary(|route| member.fit.dialect.reads(route).is_some());
    match &member.fit.unpinned {
        Some(_) => None,
        None if pins.refusal.is_some() => pins.refusal,
        None if state.watch.pins == Pins::Ignored => {
            Some(format!("pins are ignored: {}", state.detail.unwrap_or_default()))
        }
        None => None,
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.lines.join("\n"))
    }
}

impl Summary {
    pub(crate) fn new(snapshot: &Snapshot) -> Self {
        let mut lines = vec![listeners(&snapshot.config)];
        for model in &snapshot.models {
            lines.push(describe(model));
            lines.extend(model.members.iter().map(|member| format!("  {}", backend(member))));
            let config = snapshot.config.models.iter().find(|config| config.name == model.name);
            for source in config.iter().flat_map(|config| &config.discovery) {
                let (name, place, seconds) = (&source.name, &source.place, source.interval.as_secs_f64());
                lines
                    .push(format!("  backends '{name}-ADDRESS' at the addresses of {place}, polled every {seconds} s"));
            }
        }
        Self { lines }
    }
}

fn listeners(config: &Config) -> String {
    let (data, admin, metrics) = config.addresses();
    let metrics = metrics.map_or_else(|| "on the admin plane".to_owned(), |address| address.to_string());
    format!("requests at {data}, admin plane at {admin}, metrics {metrics}")
}

fn describe(model: &Model) -> String {
    let mut line = format!("model '{}'", model.name);
    let OtherNames { aliases, adapters } = &model.other_names;
    if !aliases.is_empty() {
        line.push_str(&format!(", also as '{}'", aliases.join("', '")));
    }
    if let Some(adapters) = adapters {
        let adapters = if adapters.is_empty() {
            "no adapters".to_owned()
        } else {
            format!("adapters '{}'", adapters.join("', '"))
        };
        line.push_str(&format!(", {adapters}"));
    }
    line.push_str(&format!(", policy {}", model.plan.policy.name()));
    if let Some(trial) = &model.plan.trial {
        line.push_str(&format!(" for {} percent, else {}", trial.canary.percent(), trial.baseline.name()));
    }
    if let Some(text) = &model.text {
        let template = if text.template.is_some() { "with" } else { "without" };
        let library = if text.tokenizer.is_fast().is_ok() { "fast" } else { "slow" };
        let tokens = text.tokenizer.vocab_size();
        line.push_str(&format!(", {tokens} tokens ({library} library), {template} a chat template"));
    }
    line
}

fn backend(member: &Member) -> String {
    let backend = &member.backend;
    let urls: Vec<String> = backend.config.urls.iter().map(ToString::to_string).collect();
    let ranks = if member.fit.ranks > 0 { member.fit.ranks.to_string() } else { "probed".to_owned() };
    let mut line = format!("backend '{}': {} at {}, ranks {ranks}", backend.name, backend.engine, urls.join(" "));
    if let Some(loaded) = &member.tables {
        let tables = &loaded.tables;
        let start = |digest: &str| digest.chars().take(12).collect::<String>();
        line.push_str(&format!(
            ", tables {} of placement {}",
            start(tables.digest()),
            start(tables.placement_digest())
        ));
    }
    if let Some(probe) = backend.last_probe() {
        let version = probe.version.as_deref().unwrap_or("unknown");
        let state = backend.pins.state().summary(|route| member.fit.dialect.reads(route).is_some());
        line.push_str(&format!(", version {version}, pins {}", state.watch.pins.name()));
        if let Some(detail) = state.detail {
            line.push_str(&format!(" ({detail})"));
        }
        if probe.rendering.is_some() {
            line.push_str(&chats(member));
        }
        if member.tables.is_some() && probe.server.as_ref().is_some_and(ServerInfo::exchanges_nothing) {
            line.push_str("; moe_a2a_backend is none: every EP rank processes all tokens, so affinity saves no bytes");
        }
    }
    line
}

/// Describes whether an engine tokenizes chats as the gateway does, as far as it reveals that.
fn chats(member: &Member) -> String {
    let known = Known::of(member);
    let mut said = format!(", chats {}", known.state());
    if !known.equal.is_empty() {
        said.push_str(&format!("; read alike: {}", known.equal));
    }
    if !known.equal.is_empty() || !known.differs.is_empty() {
        said.push_str(&format!("; unproven: {}", known.unproven()));
    }
    if let Some(detail) = known.detail(member) {
        said.push_str(&format!(" ({detail})"));
    }
    said
}
