//! The configuration as written in the file: names and defaults only. Unknown keys are errors.

use std::path::PathBuf;
use std::time::Duration;

use semmoe_routing::{PrefixSettings, Settings};
use serde::Deserialize;

use super::value::{any, positive, seconds};
use super::{ConfigError, RawBackend, RawDiscovery, RawServerTls};
use super::{RawAuth, RawBreaker, RawDrain, RawLog, RawQueue, RawRetry, RawSampling, RawSwitch, RawTables, RawTracing};

/// The whole file.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawConfig {
    /// Addresses and the admin plane.
    pub server: RawServer,
    /// API keys of clients.
    pub auth: RawAuth,
    /// Models, at least one.
    pub models: Vec<RawModel>,
    /// Bounds on what clients may send.
    pub limits: RawLimits,
    /// Time limits.
    pub timeouts: RawTimeouts,
    /// Probes of backends.
    pub health: RawHealth,
    /// Retries on other backends.
    pub retry: RawRetry,
    /// Backends whose requests keep failing.
    pub breaker: RawBreaker,
    /// Requests that wait for a rank.
    pub queue: RawQueue,
    /// Shutdown.
    pub drain: RawDrain,
    /// How requests are placed.
    pub routing: RawRouting,
    /// Live local activation rate.
    pub sampling: RawSampling,
    /// Loading of tables while the gateway runs.
    pub tables: RawTables,
    /// Switches between TP and EP layouts.
    pub switch: RawSwitch,
    /// Traces for a collector.
    pub tracing: RawTracing,
    /// Logs.
    pub log: RawLog,
}

section! { RawServer, "`[server]`";
    /// Address of the data plane.
    listen: String = "127.0.0.1:8080".to_owned(),
    /// Address of the admin plane; absent: loopback, on the port after the data plane's.
    admin: Option<String> = None,
    /// Address for `/healthz`, `/readyz` and `/metrics` alone; absent: only the admin plane serves them.
    metrics: Option<String> = None,
    /// SHA-256 (hexadecimal) of the bearer token for the admin plane; required off loopback.
    admin_token_sha256: Option<String> = None,
    /// Folder below which `POST /admin/tables` may name files; absent: uploads only.
    tables_root: Option<PathBuf> = None,
    /// Additional engine paths that clients may use, matched exactly, with any method; the backend is chosen by load.
    /// Engines have paths that replace weights: list no more than you need.
    extra_routes: Vec<String> = Vec::new(),
    /// Origins of web pages that may use the data plane (CORS), as `https://app.example`; `*`: all. Empty: no response
    /// carries CORS headers.
    cors_origins: Vec<String> = Vec::new(),
    /// TLS on the data plane; absent: plain text.
    tls: Option<RawServerTls> = None,
    /// TLS on the admin plane; absent: plain text.
    admin_tls: Option<RawServerTls> = None,
    /// How often the files of certificates and keys are checked for changes.
    credentials_interval_seconds: f64 = 10.0,
}

section! { RawModel, "`[[models]]`";
    /// The name that clients use.
    name: String = String::new(),
    /// Further names. Without `served_name` they are forwarded as clients wrote them: vLLM must know them
    /// (`--served-model-name A B`), SGLang accepts any.
    aliases: Vec<String> = Vec::new(),
    /// LoRA adapters that requests may name as `model:adapter`, and that `/v1/models` lists; absent: any, as the engine
    /// knows which ones it has; empty: none. Adapters with a name of their own at the engine are `aliases`.
    adapters: Option<Vec<String>> = None,
    /// `tokenizer.json` of the model, or the directory that contains it; required by policies that score prompts.
    tokenizer: Option<PathBuf> = None,
    /// A template, or a `.json` file with a field `chat_template`; absent: from `tokenizer_config.json` or
    /// `chat_template.jinja` beside the tokenizer.
    chat_template: Option<PathBuf> = None,
    /// The time zone of the engines' clocks, for templates that write the date: `UTC` (the default, and what containers
    /// usually have) or an offset such as `+02:00`.
    template_timezone: Option<String> = None,
    /// Default variables of the template, as in the engine's `--default-chat-template-kwargs`.
    chat_template_kwargs: serde_json::Map<String, serde_json::Value> = serde_json::Map::new(),
    /// Whether the engine accepts templates from requests (`--trust-request-chat-template`).
    trust_request_chat_template: bool = false,
    /// Whether the template receives message contents as text (`string`) or as lists of parts (`openai`), as in the
    /// engine's `--chat-template-content-format`; absent: what the engine detects.
    chat_template_content_format: Option<String> = None,
    /// Whether the engine omits tools when `tool_choice` is "none" (`--exclude-tools-when-tool-choice-none` of vLLM;
    /// SGLang always does).
    exclude_tools_when_tool_choice_none: bool = false,
    /// Name of the routing policy.
    policy: String = default_policy(),
    /// The policy that acts under policy `shadow`, and for the remaining requests under `canary`; absent: that of
    /// `[routing.settings]`.
    baseline: Option<String> = None,
    /// Percentage of requests routed by `policy`, the rest by `baseline`; absent: all by `policy`.
    canary: Option<u64> = None,
    /// Engines that serve the model; at least one, or `discovery`.
    backends: Vec<RawBackend> = Vec::new(),
    /// Sources of further backends while the gateway runs.
    discovery: Vec<RawDiscovery> = Vec::new(),
}

section! { RawLimits, "`[limits]`";
    /// Longest request body, in bytes.
    body_bytes: usize = 16 << 20,
    /// Memory of all request bodies together, with the copies sent and the parsed forms, in bytes; beyond it requests
    /// get 503.
    body_memory_bytes: usize = 1 << 30,
    /// Memory of all responses that clients do not read, each counted as 131072 bytes; beyond it the next stalled
    /// client loses its connection, or its HTTP/2 stream.
    answer_memory_bytes: usize = 1 << 30,
    /// Longest request head, in bytes.
    header_bytes: usize = 64 << 10,
    /// Maximum header lines of a request.
    headers: usize = 100,
    /// Longest file or upload of tables, in bytes.
    table_bytes: usize = 512 << 20,
    /// Concurrent client connections. One more replaces the oldest that never sent a request, or else the oldest idle
    /// one; if there is neither it waits.
    connections: usize = 8192,
    /// Concurrent connections per client address; more are closed. Absent: as many as `connections`. Behind a load
    /// balancer all clients share its address.
    connections_per_address: Option<usize> = None,
    /// TLS handshakes computed at a time; more wait, within their time limit. A handshake that waits for its client
    /// does not count.
    handshakes: usize = 128,
    /// Concurrent requests on one HTTP/2 connection.
    streams: u32 = 128,
    /// Attention-DP ranks of one model over all its backends. A backend that reports more than fit receives no
    /// requests.
    ranks: u16 = 1024,
    /// Concurrent requests on all HTTP/2 connections of the data plane together; more get 503 at once.
    open_streams: u32 = 16_384,
}

section! { RawTimeouts => Timeouts, "timeouts", "`[timeouts]`, in seconds";
    /// To connect to a backend.
    connect_seconds: f64 = 2.0 => connect: Duration = seconds,
    /// From sending a request to the response head. Without streaming that is the whole generation.
    first_byte_seconds: f64 = 600.0 => first_byte: Duration = seconds,
    /// Between two chunks of a response.
    idle_seconds: f64 = 120.0 => idle: Duration = seconds,
    /// For a client to send a request head; also closes an idle connection.
    header_seconds: f64 = 60.0 => header: Duration = seconds,
    /// For a client's TLS handshake.
    handshake_seconds: f64 = 10.0 => handshake: Duration = seconds,
    /// For a client to send a request's body.
    body_seconds: f64 = 60.0 => body: Duration = seconds,
    /// For a client to read any part of its response; then its connection is closed, because its request occupies a
    /// rank.
    client_seconds: f64 = 120.0 => client: Duration = seconds,
}

section! { RawHealth => HealthConfig, "health", "`[health]`";
    /// Time between two probes of a backend.
    interval_seconds: f64 = 5.0 => interval: Duration = seconds,
    /// Time limit of one probe.
    timeout_seconds: f64 = 3.0 => timeout: Duration = seconds,
    /// Consecutive failed probes after which a backend receives no more requests. A refused connection counts as all of
    /// them, and so does a 503 from vLLM or semmoe's worker.
    unhealthy_after: u32 = 2 => unhealthy_after: u32 = positive,
    /// How long a backend may accept connections without answering a probe before it receives no more requests: a busy
    /// engine is silent too. Every byte of a response restarts this time. For SGLang also how long its responses may be
    /// silent before its health route, which runs the model, is probed.
    busy_seconds: f64 = 20.0 => busy: Duration = seconds,
    /// For SGLang: how long all streams of a backend may be silent, beyond the expected time of the prompts waiting
    /// there, while its scheduler answers no probe. New requests then go to other backends, if any, until a chunk or an
    /// answer arrives. Each false alarm doubles it, up to `busy_seconds`.
    stall_seconds: f64 = 2.0 => stall: Duration = seconds,
    /// How often to query a healthy backend's version, ranks and placement, in case another engine replaced it. They
    /// are also queried after it closes a connection that was in use or kept for reuse.
    identity_seconds: f64 = 30.0 => identity: Duration = seconds,
}

section! { RawRouting => RoutingConfig, "routing", "`[routing]`";
    /// Honour pins that clients send; otherwise they are removed.
    trust_client_pins: bool = false => trust_client_pins: bool = any,
    /// Bodies of this size or more are scored off the network threads.
    offload_bytes: usize = 16 << 10 => offload_bytes: usize = any,
    /// Longest wait of such a body for its score; after it the request is routed by load and counted as `slow`.
    score_limit_seconds: f64 = 0.2 => score_limit: Duration = seconds,
    /// Memory for the token ids of earlier chat turns, per model: text, ids and overhead. 0: none.
    segment_cache_bytes: usize = 4 << 20 => segment_cache_bytes: usize = any,
    /// Header whose value policy `sticky` keeps together.
    sticky_header: String = "x-semmoe-session".to_owned() => sticky_header: http::HeaderName = header,
    /// The assumed state of the engines' prefix caches.
    prefix: PrefixSettings = PrefixSettings::default() => prefix: PrefixSettings = prefix,
    /// Parameters of the policies.
    settings: Settings = Settings::default() => settings: Settings = settings,
}

fn header(key: &str, name: String) -> Result<http::HeaderName, ConfigError> {
    name.parse().map_err(|_| ConfigError::value(key, format!("{name:?} is not the name of a header")))
}

fn prefix(key: &str, prefix: PrefixSettings) -> Result<PrefixSettings, ConfigError> {
    prefix.validate().map(|()| prefix).map_err(|error| ConfigError::value(key, error))
}

fn settings(key: &str, settings: Settings) -> Result<Settings, ConfigError> {
    settings.validate().map_err(|error| ConfigError::value(key, error))?;
    Ok(settings)
}

fn default_policy() -> String {
    // The first name of the registry is its default.
    semmoe_routing::NAMES[0].to_owned()
}
