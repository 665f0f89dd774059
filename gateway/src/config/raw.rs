//! The configuration as written in the file: only names and defaults. Unknown keys are errors.

use std::path::PathBuf;
use std::time::Duration;

use semmoe_routing::{PrefixSettings, Settings};
use serde::Deserialize;

use super::value::{any, positive, seconds};
use super::{ConfigError, RawBackend, RawDiscovery, RawServerTls};
use super::{RawAuth, RawBreaker, RawDrain, RawLog, RawQueue, RawRetry, RawSampling, RawSwitch, RawTables, RawTracing};

/// The entire configuration file.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawConfig {
    /// Listening addresses and the admin plane.
    pub server: RawServer,
    /// API keys for clients.
    pub auth: RawAuth,
    /// Models; at least one is required.
    pub models: Vec<RawModel>,
    /// Limits on what clients may send.
    pub limits: RawLimits,
    /// Time limits.
    pub timeouts: RawTimeouts,
    /// Probes of backends.
    pub health: RawHealth,
    /// Retries on other backends.
    pub retry: RawRetry,
    /// Handling of backends whose requests keep failing.
    pub breaker: RawBreaker,
    /// Queueing of requests that wait for a rank.
    pub queue: RawQueue,
    /// Shutdown.
    pub drain: RawDrain,
    /// Placement of requests.
    pub routing: RawRouting,
    /// Measurement of the live local activation rate.
    pub sampling: RawSampling,
    /// Loading of tables while the gateway runs.
    pub tables: RawTables,
    /// Switches between TP and EP layouts.
    pub switch: RawSwitch,
    /// Request traces for a collector.
    pub tracing: RawTracing,
    /// Logs.
    pub log: RawLog,
}

section! { RawServer, "`[server]`";
    /// Address of the data plane.
    listen: String = "127.0.0.1:8080".to_owned(),
    /// Address of the admin plane; absent: loopback, on the port after the data plane's.
    admin: Option<String> = None,
    /// Address that serves only `/healthz`, `/readyz` and `/metrics`; absent: only the admin plane serves them.
    metrics: Option<String> = None,
    /// SHA-256 (hexadecimal) of the admin plane's bearer token; required unless the admin address is loopback.
    admin_token_sha256: Option<String> = None,
    /// Folder that must contain the files named in `POST /admin/tables`; absent: uploads only.
    tables_root: Option<PathBuf> = None,
    /// Additional engine paths that clients may use, matched exactly, with any method; the backend is chosen by load.
    /// Some engine paths replace weights, so list only those you need.
    extra_routes: Vec<String> = Vec::new(),
    /// Origins of web pages that may use the data plane (CORS), such as `https://app.example`; `*` allows all. Empty:
    /// responses carry no CORS headers.
    cors_origins: Vec<String> = Vec::new(),
    /// TLS on the data plane; absent: plain text.
    tls: Option<RawServerTls> = None,
    /// TLS on the admin plane; absent: plain text.
    admin_tls: Option<RawServerTls> = None,
    /// How often certificate and key files are checked for changes.
    credentials_interval_seconds: f64 = 10.0,
}

section! { RawModel, "`[[models]]`";
    /// The model name that clients use.
    name: String = String::new(),
    /// Additional names. Without `served_name` they are forwarded as clients wrote them: vLLM must know them
    /// (`--served-model-name A B`), SGLang accepts any.
    aliases: Vec<String> = Vec::new(),
    /// LoRA adapters that requests may name as `model:adapter`, and that `/v1/models` lists. Absent: any, because the
    /// engine knows its adapters; empty: none. List adapters that have their own name at the engine as `aliases`.
    adapters: Option<Vec<String>> = None,
    /// The model's `tokenizer.json`, or the directory that contains it; required by policies that score prompts.
    tokenizer: Option<PathBuf> = None,
    /// A chat template, or a `.json` file with a field `chat_template`; absent: from `tokenizer_config.json` or
    /// `chat_template.jinja` next to the tokenizer.
    chat_template: Option<PathBuf> = None,
    /// Time zone of the engines' clocks, for templates that write the date: `UTC` (the default, and usual in
    /// containers) or an offset such as `+02:00`.
    template_timezone: Option<String> = None,
    /// Default template variables, as in the engine's `--default-chat-template-kwargs`.
    chat_template_kwargs: serde_json::Map<String, serde_json::Value> = serde_json::Map::new(),
    /// Whether the engine accepts templates from requests (`--trust-request-chat-template`).
    trust_request_chat_template: bool = false,
    /// Whether the template receives message contents as text (`string`) or as lists of parts (`openai`), as in the
    /// engine's `--chat-template-content-format`; absent: detected as the engine does.
    chat_template_content_format: Option<String> = None,
    /// Whether the engine omits tools when `tool_choice` is "none" (`--exclude-tools-when-tool-choice-none` of vLLM;
    /// SGLang always does).
    exclude_tools_when_tool_choice_none: bool = false,
    /// Name of the routing policy.
    policy: String = default_policy(),
    /// The policy that places requests under policy `shadow`, and the remaining requests under `canary`; absent: the
    /// one in `[routing.settings]`.
    baseline: Option<String> = None,
    /// Percentage of requests routed by `policy`; `baseline` routes the rest. Absent: `policy` routes all.
    canary: Option<u64> = None,
    /// Engines that serve the model; at least one, unless `discovery` is set.
    backends: Vec<RawBackend> = Vec::new(),
    /// Discovery sources, which add backends while the gateway runs.
    discovery: Vec<RawDiscovery> = Vec::new(),
}

section! { RawLimits, "`[limits]`";
    /// Maximum size of a request body, in bytes.
    body_bytes: usize = 16 << 20,
    /// Total memory for request bodies, including forwarded copies and parsed forms, in bytes; requests beyond it are
    /// answered 503.
    body_memory_bytes: usize = 1 << 30,
    /// Total memory for responses that clients do not read, each counted as 131072 bytes; beyond it the next stalled
    /// client loses its connection or its HTTP/2 stream.
    answer_memory_bytes: usize = 1 << 30,
    /// Maximum size of a request head, in bytes.
    header_bytes: usize = 64 << 10,
    /// Maximum number of header lines per request.
    headers: usize = 100,
    /// Maximum size of a tables file or upload, in bytes.
    table_bytes: usize = 512 << 20,
    /// Maximum concurrent client connections. A further connection replaces the oldest one that never sent a request,
    /// or else the oldest idle one; if there is neither, it waits.
    connections: usize = 8192,
    /// Maximum concurrent connections per client address; further ones are closed. Absent: equal to `connections`.
    /// Behind a load balancer all clients share its address.
    connections_per_address: Option<usize> = None,
    /// Maximum TLS handshakes computed concurrently; others wait, within their time limit. Handshakes that are waiting
    /// for the client do not count.
    handshakes: usize = 128,
    /// Maximum concurrent requests per HTTP/2 connection.
    streams: u32 = 128,
    /// Maximum attention-DP ranks per model, over all its backends. A backend that would exceed it receives no
    /// requests.
    ranks: u16 = 1024,
    /// Maximum concurrent requests across all HTTP/2 connections of the data plane; further ones are answered 503 at
    /// once.
    open_streams: u32 = 16_384,
}

section! { RawTimeouts => Timeouts, "timeouts", "`[timeouts]`, in seconds";
    /// Time limit for connecting to a backend.
    connect_seconds: f64 = 2.0 => connect: Duration = seconds,
    /// Time limit from sending a request to receiving the response head. Without streaming, that includes the entire
    /// generation.
    first_byte_seconds: f64 = 600.0 => first_byte: Duration = seconds,
    /// Time limit between two chunks of a response.
    idle_seconds: f64 = 120.0 => idle: Duration = seconds,
    /// Time limit for a client to send a request head; also closes idle connections.
    header_seconds: f64 = 60.0 => header: Duration = seconds,
    /// Time limit for a client's TLS handshake.
    handshake_seconds: f64 = 10.0 => handshake: Duration = seconds,
    /// Time limit for a client to send a request body.
    body_seconds: f64 = 60.0 => body: Duration = seconds,
    /// Time limit for a client to read any part of its response. Its connection is then closed, because the request
    /// occupies a rank.
    client_seconds: f64 = 120.0 => client: Duration = seconds,
}

section! { RawHealth => HealthConfig, "health", "`[health]`";
    /// Time between two probes of a backend.
    interval_seconds: f64 = 5.0 => interval: Duration = seconds,
    /// Time limit of one probe.
    timeout_seconds: f64 = 3.0 => timeout: Duration = seconds,
    /// Number of consecutive failed probes after which a backend receives no more requests. A single refused
    /// connection, or a 503 from vLLM or semmoe's worker, is enough.
    unhealthy_after: u32 = 2 => unhealthy_after: u32 = positive,
    /// How long a backend may accept connections without answering a probe before it receives no more requests: a busy
    /// engine is silent too. Every response byte restarts this period. For SGLang, it is also how long responses may be
    /// silent before the gateway probes the health route, which runs the model.
    busy_seconds: f64 = 20.0 => busy: Duration = seconds,
    /// For SGLang: how long all streams of a backend may be silent, beyond the expected time of the prompts waiting
    /// there, while its scheduler answers no probes. New requests are then sent to other backends, if any, until a
    /// chunk or an answer arrives. Each false alarm doubles the period, up to `busy_seconds`.
    stall_seconds: f64 = 2.0 => stall: Duration = seconds,
    /// How often to query a healthy backend's version, ranks and placement, in case another engine replaced it. The
    /// gateway also queries them after the backend closes a connection that was in use or kept for reuse.
    identity_seconds: f64 = 30.0 => identity: Duration = seconds,
}

section! { RawRouting => RoutingConfig, "routing", "`[routing]`";
    /// Whether to honour pins that clients send; otherwise they are removed.
    trust_client_pins: bool = false => trust_client_pins: bool = any,
    /// Minimum size of the bodies that are scored off the network threads.
    offload_bytes: usize = 16 << 10 => offload_bytes: usize = any,
    /// Maximum wait for the score of such a large body; after it the request is routed by load and counted as `slow`.
    score_limit_seconds: f64 = 0.2 => score_limit: Duration = seconds,
    /// Memory per model for caching the token ids of earlier chat turns: text, ids and overhead. 0: no cache.
    segment_cache_bytes: usize = 4 << 20 => segment_cache_bytes: usize = any,
    /// Header whose value policy `sticky` uses to keep requests together.
    sticky_header: String = "x-semmoe-session".to_owned() => sticky_header: http::HeaderName = header,
    /// Settings for the estimated state of the engines' prefix caches.
    prefix: PrefixSettings = PrefixSettings::default() => prefix: PrefixSettings = prefix,
    /// Policy parameters.
    settings: Settings = Settings::default() => settings: Settings = settings,
}

fn header(key: &str, name: String) -> Result<http::HeaderName, ConfigError> {
    name.parse().map_err(|_| ConfigError::value(key, format!("{name:?} is not a valid header name")))
}

fn prefix(key: &str, prefix: PrefixSettings) -> Result<PrefixSettings, ConfigError> {
    prefix.validate().map(|()| prefix).map_err(|error| ConfigError::value(key, error))
}

fn settings(key: &str, settings: Settings) -> Result<Settings, ConfigError> {
    settings.validate().map_err(|error| ConfigError::value(key, error))?;
    Ok(settings)
}

fn default_policy() -> String {
    // The registry lists its default first.
    semmoe_routing::NAMES[0].to_owned()
}
