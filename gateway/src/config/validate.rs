//! Turns the raw configuration into the validated one: the only place that validates it.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use super::backend::backend;
use super::value::{at_least, digest, seconds, unique};
use super::{
    Config, ConfigError, DrainRules, HealthConfig, ModelConfig, OtherNames, QueueRules, RawBackend, RawConfig,
    RawLimits, RawModel, RawServer, Result, RoutingConfig, ServerConfig, Timeouts, TracingConfig,
};

pub(super) fn validate(raw: RawConfig, base: &Path) -> Result<Config> {
    let routing = RoutingConfig::check(raw.routing)?;
    let mut names = Names::default();
    if raw.models.is_empty() {
        return Err(ConfigError::value("models", "empty, expected at least one [[models]]"));
    }
    let models = raw.models.into_iter().enumerate();
    let models: Vec<ModelConfig> = models
        .map(|(index, raw)| model(&format!("models[{index}]"), raw, base, &routing, &mut names))
        .collect::<Result<_>>()?;
    let limits = limits(raw.limits)?;
    bound_ranks(&models, &limits)?;
    Ok(Config {
        source: super::Source::default(),
        server: server(raw.server, base)?,
        switch: super::switching::switch(raw.switch, &models)?,
        auth: super::auth::auth(raw.auth, &models, &routing.sticky_header)?,
        models,
        limits,
        timeouts: Timeouts::check(raw.timeouts)?,
        health: HealthConfig::check(raw.health)?,
        retry: super::faults::retry(raw.retry)?,
        breaker: super::faults::breaker(raw.breaker)?,
        queue: QueueRules::check(raw.queue)?,
        drain: DrainRules::check(raw.drain)?,
        routing,
        sampling: super::sampling::sampling(raw.sampling, base)?,
        tables: super::tables::tables(raw.tables, base)?,
        tracing: TracingConfig::check(raw.tracing)?,
        log: raw.log,
    })
}

/// Names in use so far: model names and aliases in one set, backends in another.
#[derive(Default)]
struct Names {
    models: HashSet<String>,
    backends: HashSet<String>,
}

fn server(raw: RawServer, base: &Path) -> Result<ServerConfig> {
    let listen = address("server.listen", &raw.listen)?;
    let admin = match &raw.admin {
        Some(admin) => address("server.admin", admin)?,
        None => default_admin(listen)?,
    };
    let metrics = raw.metrics.as_deref().map(|metrics| address("server.metrics", metrics)).transpose()?;
    let admin_token_sha256 = raw.admin_token_sha256.as_deref();
    let admin_token_sha256 = admin_token_sha256.map(|hex| digest("server.admin_token_sha256", hex)).transpose()?;
    if !admin.ip().is_loopback() && admin_token_sha256.is_none() {
        return Err(ConfigError::value(
            "server.admin",
            format!("{admin} is not a loopback address, so server.admin_token_sha256 must be set"),
        ));
    }
    let mut bound: Vec<(&str, SocketAddr)> = vec![("server.listen", listen)];
    for (key, address) in [("server.admin", Some(admin)), ("server.metrics", metrics)] {
        let Some(address) = address else { continue };
        if let Some((other, _)) = bound.iter().find(|(_, taken)| *taken == address && address.port() != 0) {
            return Err(ConfigError::value(key, format!("{address} is already used by {other}")));
        }
        bound.push((key, address));
    }
    Ok(ServerConfig {
        listen,
        admin,
        metrics,
        admin_token_sha256,
        tables_root: raw.tables_root.map(|path| base.join(path)),
        extra_routes: extra_routes(raw.extra_routes)?,
        cors_origins: super::auth::cors_origins(raw.cors_origins)?,
        tls: raw.tls.map(|tls| tls.below(base)),
        admin_tls: raw.admin_tls.map(|tls| tls.below(base)),
        credentials_interval: seconds("server.credentials_interval_seconds", raw.credentials_interval_seconds)?,
    })
}

/// Checks the configured ranks against `limits.ranks`; the ranks that backends report are checked later.
fn bound_ranks(models: &[ModelConfig], limits: &RawLimits) -> Result<()> {
    for (index, model) in models.iter().enumerate() {
        let ranks: usize = model.backends.iter().map(|it| it.ranks.map_or(it.urls.len(), usize::from)).sum();
        if ranks > usize::from(limits.ranks) {
            let cause = format!("{ranks} ranks, but limits.ranks is {}", limits.ranks);
            return Err(ConfigError::value(format!("models[{index}].backends"), cause));
        }
    }
    Ok(())
}

/// Checks that paths are in normal form and do not collide with the gateway's own.
fn extra_routes(routes: Vec<String>) -> Result<Vec<String>> {
    for (at, path) in routes.iter().enumerate() {
        let wrong =
            |cause: &str| Err(ConfigError::value(format!("server.extra_routes[{at}]"), format!("'{path}' {cause}")));
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-_.~".contains(&byte);
        let odd = |part: &str| matches!(part, "" | "." | "..");
        if !path.starts_with('/') || path.len() > 256 || !path.bytes().all(plain) || path[1..].split('/').any(odd) {
            return wrong("is not a plain path like /v1/score");
        }
        if path == "/v1/models"
            || path == super::HEALTH
            || semmoe_engines::Route::ALL.iter().any(|route| route.path() == path)
        {
            return wrong("is already one of the gateway's routes");
        }
        if routes[..at].contains(path) {
            return wrong("is there already");
        }
    }
    Ok(routes)
}

fn address(key: &str, text: &str) -> Result<SocketAddr> {
    text.parse().map_err(|_| ConfigError::value(key, format!("'{text}' is not an address like 127.0.0.1:8080")))
}

fn default_admin(listen: SocketAddr) -> Result<SocketAddr> {
    let port = match listen.port() {
        0 => 0,
        port => port.checked_add(1).ok_or_else(|| {
            ConfigError::value("server.admin", "must be set, because no port follows server.listen's (65535)")
        })?,
    };
    Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port))
}

fn model(key: &str, raw: RawModel, base: &Path, routing: &RoutingConfig, names: &mut Names) -> Result<ModelConfig> {
    let policy = super::policy::policies(key, &raw, routing)?;
    let needs = policy.needs;
    for (at, name) in std::iter::once(&raw.name).chain(&raw.aliases).enumerate() {
        let key = if at == 0 { format!("{key}.name") } else { format!("{key}.aliases[{}]", at - 1) };
        unique(&key, name, &mut names.models)?;
    }
    for (at, adapter) in raw.adapters.iter().flatten().enumerate() {
        let key = format!("{key}.adapters[{at}]");
        if adapter.is_empty() {
            return Err(ConfigError::value(key, "empty, expected the name of an adapter"));
        }
        unique(&key, &format!("{}:{adapter}", raw.name), &mut names.models)?;
    }
    if (needs.share || needs.cached) && raw.tokenizer.is_none() {
        let reads = if needs.share { "scores prompts" } else { "reads prompts" };
        let cause = format!("must be set, because policy '{}' {reads}", raw.policy);
        return Err(ConfigError::value(format!("{key}.tokenizer"), cause));
    }
    if raw.backends.is_empty() && raw.discovery.is_empty() {
        return Err(ConfigError::value(format!("{key}.backends"), "empty, expected at least one [[models.backends]]"));
    }
    let scoring = needs.share.then_some(policy.name.as_str());
    let backends = raw.backends.into_iter().enumerate();
    let backends = backends
        .map(|(index, raw)| backend(&format!("{key}.backends[{index}]"), raw, base, scoring, &mut names.backends))
        .collect::<Result<_>>()?;
    let mut discovery = Vec::new();
    for (index, raw) in raw.discovery.iter().enumerate() {
        let key = format!("{key}.discovery[{index}]");
        let common = |raw: RawBackend| backend(&key, raw, base, scoring, &mut names.backends);
        discovery.push(super::discovery::discovery(&key, raw, base, common)?);
    }
    let zone = raw.template_timezone.as_deref().unwrap_or("UTC");
    let zone_seconds = zone_seconds(zone).ok_or_else(|| {
        let cause = format!("'{zone}', expected UTC or an offset from it such as +02:00");
        ConfigError::value(format!("{key}.template_timezone"), cause)
    })?;
    let below = |path: Option<PathBuf>| path.map(|path| base.join(path));
    let lists = match raw.chat_template_content_format.as_deref() {
        None | Some("auto") => None,
        Some("string") => Some(false),
        Some("openai") => Some(true),
        Some(other) => {
            let cause = format!("'{other}', expected auto, string or openai");
            return Err(ConfigError::value(format!("{key}.chat_template_content_format"), cause));
        }
    };
    let chat_options = semmoe_text::ChatOptions {
        variables: raw.chat_template_kwargs,
        trusts_templates: raw.trust_request_chat_template,
        lists,
        no_tools_for_none: raw.exclude_tools_when_tool_choice_none,
    };
    Ok(ModelConfig {
        name: raw.name,
        other_names: OtherNames { aliases: raw.aliases, adapters: raw.adapters },
        tokenizer: below(raw.tokenizer).map(|path| semmoe_text::tokenizer_file(&path)),
        chat_template: below(raw.chat_template),
        zone_seconds,
        chat_options,
        policy,
        backends,
        discovery,
    })
}

/// Returns the offset from UTC, in seconds, that `UTC` or `+HH:MM` denotes.
fn zone_seconds(zone: &str) -> Option<i32> {
    let (sign, time) = match zone.split_at_checked(1)? {
        ("+", time) => (1, time),
        ("-", time) => (-1, time),
        _ => return (zone == "UTC").then_some(0),
    };
    let (hours, minutes) = time.split_once(':')?;
    let number = |digits: &str, most: i32| {
        let is_one = digits.len() == 2 && digits.bytes().all(|byte| byte.is_ascii_digit());
        is_one.then(|| digits.parse::<i32>().ok()).flatten().filter(|number| *number <= most)
    };
    Some(sign * (number(hours, 14)? * 3600 + number(minutes, 59)? * 60))
}

fn limits(mut limits: RawLimits) -> Result<RawLimits> {
    for (key, value, least) in [
        ("body_bytes", limits.body_bytes, 1),
        // The total must allow a single body of maximum size.
        ("body_memory_bytes", limits.body_memory_bytes, limits.body_bytes),
        ("answer_memory_bytes", limits.answer_memory_bytes, 128 << 10),
        ("header_bytes", limits.header_bytes, 8192),
        ("headers", limits.headers, 1),
        ("table_bytes", limits.table_bytes, 1),
        ("connections", limits.connections, 1),
        ("connections_per_address", limits.connections_per_address.unwrap_or(1), 1),
        ("handshakes", limits.handshakes, 1),
        ("streams", limits.streams as usize, 1),
        ("ranks", limits.ranks.into(), 1),
        ("open_streams", limits.open_streams as usize, 1),
    ] {
        at_least(&format!("limits.{key}"), value, least)?;
    }
    limits.connections = limits.connections.min(tokio::sync::Semaphore::MAX_PERMITS);
    limits.handshakes = limits.handshakes.min(tokio::sync::Semaphore::MAX_PERMITS);
    Ok(limits)
}
