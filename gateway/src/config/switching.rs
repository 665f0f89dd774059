//! `[switch]`: whether and by which rules backends switch between TP and EP layouts automatically.

use std::time::Duration;

use schemars::JsonSchema;
use semmoe_engines::Engine;
use semmoe_engines::SharedError;
use semmoe_engines::http::BaseUrl;
use semmoe_planner::policy::{
    Adaptive, ByLayout, Layout, LayoutPrior, Point, Prior, Settings, SettingsError, StepCurve, SwitchCost, TtftTarget,
};
use serde::{Deserialize, Serialize};

use super::value::{MAX_SECONDS, seconds};
use super::{BackendConfig, ConfigError, ModelConfig, Result};

/// One hour, the policy's own limit.
const MAX_TTFT_MS: f64 = 3.6e6;

/// Whether the gateway switches layouts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SwitchMode {
    /// The policy is off.
    #[default]
    Off,
    /// Decisions are only shown, counted and logged.
    Advise,
    /// Decisions are executed.
    Drive,
}

/// How to treat new requests for a backend that is switching.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Meanwhile {
    /// New requests are sent to the backend and wait there.
    #[default]
    Hold,
    /// New requests are sent to other backends, if there are any.
    Redirect,
}

section! { RawSwitch, "`[switch]`";
    /// `off`, `advise` (decisions are only shown, counted and logged) or `drive` (they are executed).
    mode: SwitchMode = SwitchMode::Off,
    /// How to treat new requests for a worker that is switching: `hold` (they wait there) or `redirect` (they are sent
    /// to other backends, if any).
    meanwhile: Meanwhile = Meanwhile::Hold,
    /// The worker's name for the small-batch layout: `tp`, groups such as `tp:2x4`, or `dp-tp` if attention stays dp.
    tp_layout: String = "tp".to_owned(),
    /// The worker's name for the large-batch layout: `ep`, or `tp-ep` if attention stays tp.
    ep_layout: String = "ep".to_owned(),
    /// Assumed decode step times with TP until some are measured: `[[batch, milliseconds], ...]`, with batches of the
    /// whole backend in ascending order, the last at least `max_sequences`. Required unless off.
    tp_step_ms: Vec<(u32, f64)> = Vec::new(),
    /// Assumed decode step times with EP until some are measured, as in `tp_step_ms`.
    ep_step_ms: Vec<(u32, f64)> = Vec::new(),
    /// Assumed prefill rate with TP, in prompt tokens per second, until one is measured. Required unless off.
    tp_prefill_rate: Option<f64> = None,
    /// Assumed prefill rate with EP, in prompt tokens per second, until one is measured. Required unless off.
    ep_prefill_rate: Option<f64> = None,
    /// KV cache capacity with TP, in tokens; absent: only the worker decides whether a switch has room.
    tp_kv_tokens: Option<u64> = None,
    /// KV cache capacity with EP, in tokens; absent: only the worker decides whether a switch has room.
    ep_kv_tokens: Option<u64> = None,
    /// Assumed duration of a switch until one is measured.
    switch_seconds: f64 = 0.5,
    /// How often a backend is polled and the policy evaluated.
    interval_seconds: f64 = 0.25,
    /// Maximum wait for a worker's reply to a prepare, a status or an abort; a prepare without a reply is aborted.
    // The worker itself allows its ranks 10 s.
    prepare_seconds: f64 = 12.0,
    /// Maximum wait for a switch to complete, and for a webhook's response.
    commit_seconds: f64 = 60.0,
    /// TTFT targets for streams, keyed by the `priority` in the request body (0 if absent; priorities outside 0 to 255
    /// have no target): `[[priority, milliseconds], ...]`. If a waiting stream would miss its target, and would wait
    /// less in the other layout, the backend switches immediately.
    ttft_ms: Vec<(u8, f64)> = Vec::new(),
    /// URL called to switch engines without a hook; absent: traffic moves between their TP and EP backends.
    webhook: Option<String> = None,
    /// The expected gain over this many seconds counts in advance; the rest counts as it accrues.
    horizon_seconds: f64 = Settings::default().horizon_seconds,
    /// Minimum gain, as a fraction of the step time; smaller gains are noise.
    least_gain: f64 = Settings::default().least_gain,
    /// Factor by which the expected savings must exceed the cost of switching there and back.
    margin: f64 = Settings::default().margin,
    /// Minimum time between switches. After a failed switch the minimum is twice that (at least 2 s), and doubles with
    /// each further failure, up to 64 times the original.
    dwell_seconds: f64 = Settings::default().dwell_seconds,
    /// Window of the fast moving average of arrivals.
    fast_seconds: f64 = Settings::default().fast_seconds,
    /// Window of the slow moving average of arrivals.
    slow_seconds: f64 = Settings::default().slow_seconds,
    /// Maximum KV cache utilization, as a fraction, that a switch may cause in the target layout.
    guard_close: f64 = Settings::default().guard_close,
    /// After a refused switch, the utilization below which switching is allowed again.
    guard_reopen: f64 = Settings::default().guard_reopen,
    /// Maximum number of prompt tokens in a backend's step.
    chunk_tokens: u32 = Settings::default().chunk_tokens,
    /// Maximum number of sequences that a backend decodes concurrently.
    max_sequences: u32 = Settings::default().max_sequences,
}

/// The webhook that switches engines without a hook.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Webhook {
    pub(crate) server: BaseUrl,
    /// The URL's path, starting with `/`.
    pub(crate) path: String,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SwitchConfig {
    pub(crate) mode: SwitchMode,
    pub(crate) meanwhile: Meanwhile,
    /// The worker's names for both layouts.
    pub(crate) names: ByLayout<String>,
    pub(crate) interval: Duration,
    pub(crate) prepare: Duration,
    pub(crate) commit: Duration,
    pub(crate) webhook: Option<Webhook>,
    pub(crate) prior: Prior,
    settings: Settings,
    switch_seconds: f64,
    room_tokens: ByLayout<u64>,
}

impl SwitchConfig {
    /// Creates a policy without observations.
    ///
    /// # Errors
    /// Never for a validated configuration.
    pub(crate) fn policy(&self) -> std::result::Result<Adaptive, SettingsError> {
        let cost = SwitchCost {
            ranks: 1,
            weight_bytes: 0,
            token_bytes: ByLayout::default(),
            bytes_per_second: 1.0,
            fixed_seconds: self.switch_seconds,
        };
        Adaptive::new(self.settings.clone(), self.prior.clone(), cost, self.room_tokens)
    }

    /// Whether waiting streams are compared with TTFT targets.
    pub(crate) fn has_targets(&self) -> bool {
        !self.settings.ttft.is_empty()
    }

    /// Returns the layout that a worker knows by this name.
    pub(crate) fn layout(&self, name: &str) -> Option<Layout> {
        [Layout::Tp, Layout::Ep].into_iter().find(|layout| self.names[*layout] == name)
    }
}

fn wrong<T>(key: &str, cause: impl Into<SharedError>) -> Result<T> {
    Err(ConfigError::value(format!("switch.{key}"), cause))
}

pub(super) fn switch(raw: RawSwitch, models: &[ModelConfig]) -> Result<SwitchConfig> {
    if let Some((priority, ms)) = raw.ttft_ms.iter().find(|(_, ms)| !(*ms > 0.0 && *ms <= MAX_TTFT_MS)) {
        return wrong(
            "ttft_ms",
            format!("{ms} for priority {priority}, expected more than 0 and at most {MAX_TTFT_MS}"),
        );
    }
    let targets = raw.ttft_ms.iter().map(|&(priority, ms)| TtftTarget { priority, seconds: ms / 1e3 });
    let settings = Settings {
        horizon_seconds: raw.horizon_seconds,
        least_gain: raw.least_gain,
        margin: raw.margin,
        dwell_seconds: raw.dwell_seconds,
        fast_seconds: raw.fast_seconds,
        slow_seconds: raw.slow_seconds,
        guard_close: raw.guard_close,
        guard_reopen: raw.guard_reopen,
        chunk_tokens: raw.chunk_tokens,
        max_sequences: raw.max_sequences,
        ttft: targets.collect(),
    };
    settings.validate().map_err(|error| ConfigError::value("switch", error))?;
    if raw.tp_layout == raw.ep_layout {
        return wrong("tp_layout", format!("'{}', expected a layout other than ep_layout", raw.tp_layout));
    }
    if !(0.0..=MAX_SECONDS).contains(&raw.switch_seconds) || raw.switch_seconds == 0.0 {
        return wrong("switch_seconds", format!("{}, expected more than 0 and at most a day", raw.switch_seconds));
    }
    let prior = ByLayout { tp: prior(&raw, Layout::Tp)?, ep: prior(&raw, Layout::Ep)? };
    let webhook = raw.webhook.as_deref().map(webhook).transpose()?;
    check_hooks(raw.mode, webhook.is_some(), models)?;
    Ok(SwitchConfig {
        mode: raw.mode,
        meanwhile: raw.meanwhile,
        names: ByLayout { tp: raw.tp_layout, ep: raw.ep_layout },
        interval: seconds("switch.interval_seconds", raw.interval_seconds)?,
        prepare: seconds("switch.prepare_seconds", raw.prepare_seconds)?,
        commit: seconds("switch.commit_seconds", raw.commit_seconds)?,
        webhook,
        prior,
        settings,
        switch_seconds: raw.switch_seconds,
        room_tokens: ByLayout { tp: raw.tp_kv_tokens.unwrap_or(u64::MAX), ep: raw.ep_kv_tokens.unwrap_or(u64::MAX) },
    })
}

/// Returns a layout's configured step times and prefill rate.
fn prior(raw: &RawSwitch, layout: Layout) -> Result<LayoutPrior> {
    let (steps, rate) = match layout {
        Layout::Tp => (&raw.tp_step_ms, raw.tp_prefill_rate),
        Layout::Ep => (&raw.ep_step_ms, raw.ep_prefill_rate),
    };
    let (steps_key, rate_key) = (format!("{}_step_ms", layout.name()), format!("{}_prefill_rate", layout.name()));
    if steps.is_empty() && raw.mode == SwitchMode::Off {
        return Ok(LayoutPrior::default());
    }
    if steps.is_empty() {
        return wrong(&steps_key, "must be set unless switch.mode is \"off\": the policy compares both layouts");
    }
    let points = steps.iter().map(|&(sequences, milliseconds)| Point { sequences, seconds: milliseconds / 1e3 });
    let curve = StepCurve::new(points.collect());
    let curve = curve.map_err(|error| ConfigError::value(format!("switch.{steps_key}"), error))?;
    if curve.seconds(raw.max_sequences).is_none() {
        let last = steps.last().map_or(0, |point| point.0);
        let cause = format!("ends at a batch of {last}, but switch.max_sequences is {}", raw.max_sequences);
        return wrong(&steps_key, cause);
    }
    match rate {
        Some(rate) if rate.is_finite() && rate > 0.0 => {
            Ok(LayoutPrior { steps: Some(curve), prefill_tokens_per_second: Some(rate) })
        }
        Some(rate) => wrong(&rate_key, format!("{rate}, expected more than 0")),
        None => wrong(&rate_key, "must be set if step times are set"),
    }
}

/// Parses a webhook URL: a server address followed by any path.
fn webhook(url: &str) -> Result<Webhook> {
    let host = url.find("://").map_or(0, |at| at + 3);
    let path = url[host..].find('/').map_or(url.len(), |at| host + at);
    let server: BaseUrl = url[..path].parse().map_err(|error| ConfigError::value("switch.webhook", error))?;
    let path = if path == url.len() { "/" } else { &url[path..] };
    server.join(path).map_err(|error| ConfigError::value("switch.webhook", error))?;
    Ok(Webhook { server, path: path.to_owned() })
}

/// Checks that every backend can be switched: by a hook, a webhook or a pool with the other layout.
fn check_hooks(mode: SwitchMode, webhook: bool, models: &[ModelConfig]) -> Result<()> {
    for (model_at, model) in models.iter().enumerate() {
        let templates = model.discovery.iter().map(|source| &source.template).enumerate();
        let templates = templates.map(|(at, backend)| (format!("models[{model_at}].discovery[{at}]"), backend));
        let configured = model.backends.iter().filter(|backend| backend.found.is_none()).enumerate();
        let configured = configured.map(|(at, backend)| (format!("models[{model_at}].backends[{at}]"), backend));
        let all: Vec<(String, &BackendConfig)> = configured.chain(templates).collect();
        for (key, backend) in &all {
            let refuse = |cause: String| Err(ConfigError::value(format!("{key}.layout"), cause));
            match (backend.engine, backend.layout) {
                (Engine::Semmoe, Some(_)) => {
                    return refuse("set, but semmoe's worker reports its layout itself".to_owned());
                }
                (Engine::Semmoe, None) => {}
                (engine, None) if mode == SwitchMode::Drive => {
                    return refuse(format!(
                        "must be set, because switch.mode is \"drive\" and {engine} has no switch hook: the layout that it runs \
                         (moved between pools), or starts in (switch.webhook)"
                    ));
                }
                (_, Some(layout)) if mode == SwitchMode::Drive && !webhook => {
                    let other = layout.other();
                    if !all.iter().any(|(_, backend)| backend.layout == Some(other)) {
                        return refuse(format!(
                            "'{}', but no backend of model '{}' has '{}' and there is no switch.webhook",
                            layout.name(),
                            model.name,
                            other.name()
                        ));
                    }
                }
                _ => {}
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_webhook_is_a_server_and_a_path() {
        let parsed = |url: &str| webhook(url).map(|hook| (hook.server.to_string(), hook.path));
        assert_eq!(parsed("http://ops:9000").unwrap(), ("http://ops:9000".to_owned(), "/".to_owned()));
        let found = parsed("https://ops/a/switch?unit=1").unwrap();
        assert_eq!(found, ("https://ops".to_owned(), "/a/switch?unit=1".to_owned()));
        for wrong in ["", "ops:9000/x", "ftp://ops/x", "http:///x"] {
            assert!(parsed(wrong).unwrap_err().to_string().starts_with("switch.webhook: "), "{wrong}");
        }
    }
}
