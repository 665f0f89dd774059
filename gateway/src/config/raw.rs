//! The configuration as it stands in the file: names, defaults and nothing else. Unknown keys are errors.

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
    /// Bounds on what a client may send.
    pub limits: RawLimits,
    /// How long to wait for what.
    pub timeouts: RawTimeouts,
    /// Probing of backends.
    pub health: RawHealth,
    /// Requests sent to a second backend.
    pub retry: RawRetry,
    /// Backends whose requests fail in a row.
    pub breaker: RawBreaker,
    /// Requests that wait for a rank.
    pub queue: RawQueue,
    /// How the process ends.
    pub drain: RawDrain,
    /// How requests are placed.
    pub routing: RawRouting,
    /// Live local activation rate.
    pub sampling: RawSampling,
    /// Loading of tables while the gateway runs.
    pub tables: RawTables,
    /// Changes between TP and EP layouts.
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
    /// Address for `/healthz`, `/readyz` and `/metrics` alone; absent: only the admin plane has them.
    metrics: Option<String> = None,
    /// SHA-256 (hexadecimal) of the bearer token that the admin plane asks for; needed unless it is on loopback.
    admin_token_sha256: Option<String> = None,
    /// Folder below which `POST /admin/tables` may name files; absent: uploads only.
    tables_root: Option<PathBuf> = None,
    /// Further paths of the engines that clients may use, exactly as they stand here, with any method; the backend is
    /// chosen by load. Engines have paths that replace weights: list no more than is needed.
    extra_routes: Vec<String> = Vec::new(),
    /// Origins of web pages that may use the data plane (CORS), as `https://app.example`; `*`: all. Empty: no answer
    /// says so.
    cors_origins: Vec<String> = Vec::new(),
    /// TLS on the data plane; absent: plain.
    tls: Option<RawServerTls> = None,
    /// TLS on the admin plane; absent: plain.
    admin_tls: Option<RawServerTls> = None,
    /// How often files with certificates and keys are looked at; changed ones are read again.
    credentials_interval_seconds: f64 = 10.0,
}

section! { RawModel, "`[[models]]`";
    /// As clients name it.
    name: String = String::new(),
    /// Further names. Without `served_name` they go to the engines as clients wrote them: vLLM must know them
    /// (`--served-model-name A B`), SGLang does not mind.
    aliases: Vec<String> = Vec::new(),
    /// LoRA adapters that requests may name as `model:adapter`, and that `/v1/models` lists; absent: any, as the engine
    /// knows which ones it has; empty: none. Adapters that the engine knows by a name of their own are `aliases`.
    adapters: Option<Vec<String>> = None,
    /// `tokenizer.json` of the model, or the directory with it; needed by policies that score prompts.
    tokenizer: Option<PathBuf> = None,
    /// A template, or a `.json` file with a field `chat_template`; absent: from `tokenizer_config.json` or
    /// `chat_template.jinja` beside the tokenizer.
    chat_template: Option<PathBuf> = None,
    /// The time zone of the engines' clocks, for templates that write the date: `UTC` (the default, and what containers
    /// usually have) or an offset such as `+02:00`.
    template_timezone: Option<String> = None,
    /// Variables of the template where a request does not set them, as the engine's `--default-chat-template-kwargs`.
    chat_template_kwargs: serde_json::Map<String, serde_json::Value> = serde_json::Map::new(),
    /// Whether the engine takes templates from requests (`--trust-request-chat-template`).
    trust_request_chat_template: bool = false,
    /// Whether the template gets contents of messages as texts (`string`) or as lists of parts (`openai`), as the
    /// engine's `--chat-template-content-format`; absent: what the engine finds out by itself.
    chat_template_content_format: Option<String> = None,
    /// Whether the engine leaves tools out where `tool_choice` is "none"
    /// (`--exclude-tools-when-tool-choice-none` of vLLM; SGLang always does).
    exclude_tools_when_tool_choice_none: bool = false,
    /// Name of the routing policy.
    policy: String = default_policy(),
    /// The policy that requests go by with policy `shadow`, and the rest of them with `canary`; absent: that of
    /// `[routing.settings]`.
    baseline: Option<String> = None,
    /// Percent of the requests that go by `policy`, the rest by `baseline`; absent: all by `policy`.
    canary: Option<u64> = None,
    /// Engines that serve it, at least one, or `discovery`.
    backends: Vec<RawBackend> = Vec::new(),
    /// Where further ones are found while the gateway runs.
    discovery: Vec<RawDiscovery> = Vec::new(),
}

section! { RawLimits, "`[limits]`";
    /// Longest request body, in bytes.
    body_bytes: usize = 16 << 20,
    /// Memory of all request bodies together, with copies of them that are sent and what is parsed from them, in bytes;
    /// beyond it requests get 503.
    body_memory_bytes: usize = 1 << 30,
    /// Memory of all answers together whose clients do not take them, each counted as 131072 bytes; the next client
    /// that takes nothing loses its connection, or its HTTP/2 stream.
    answer_memory_bytes: usize = 1 << 30,
    /// Longest request head, in bytes.
    header_bytes: usize = 64 << 10,
    /// Most header lines of a request.
    headers: usize = 100,
    /// Longest file or upload of tables, in bytes.
    table_bytes: usize = 512 << 20,
    /// Connections of clients at a time. A further one takes the place of the one that has been there longest of those
    /// that never sent a request, or else of those without a request now; where there is none it waits.
    connections: usize = 8192,
    /// Connections of one client address at a time, of which further ones are closed; absent: as many as `connections`.
    /// Behind a load balancer all clients have its address.
    connections_per_address: Option<usize> = None,
    /// TLS handshakes that are computed at a time; further ones wait, within their time. One that waits for its client
    /// does not count.
    handshakes: usize = 128,
    /// Requests at a time on one HTTP/2 connection.
    streams: u32 = 128,
    /// Attention-DP ranks of one model, over all its backends. A backend that reports more than fit gets no requests.
    ranks: u16 = 1024,
    /// Requests at a time on all HTTP/2 connections of the data plane together; further ones get 503 at once.
    open_streams: u32 = 16_384,
}

section! { RawTimeouts => Timeouts, "timeouts", "`[timeouts]`, in seconds";
    /// To connect to a backend.
    connect_seconds: f64 = 2.0 => connect: Duration = seconds,
    /// From sending a request to the head of its answer. Without streaming that is the whole generation.
    first_byte_seconds: f64 = 600.0 => first_byte: Duration = seconds,
    /// Between two pieces of an answer.
    idle_seconds: f64 = 120.0 => idle: Duration = seconds,
    /// For a client to send a request's head; an idle connection is closed after it, too.
    header_seconds: f64 = 60.0 => header: Duration = seconds,
    /// For a client's TLS handshake.
    handshake_seconds: f64 = 10.0 => handshake: Duration = seconds,
    /// For a client to send a request's body.
    body_seconds: f64 = 60.0 => body: Duration = seconds,
    /// For a client to take any of what it is sent; then its connection is closed, as its request holds a rank.
    client_seconds: f64 = 120.0 => client: Duration = seconds,
}

section! { RawHealth => HealthConfig, "health", "`[health]`";
    /// Time between two probes of a backend.
    interval_seconds: f64 = 5.0 => interval: Duration = seconds,
    /// Time that one probe may take.
    timeout_seconds: f64 = 3.0 => timeout: Duration = seconds,
    /// Failed probes in a row after which a backend gets no more requests. A refused connection counts as all of them,
    /// and so does a 503 from vLLM or semmoe's worker.
    unhealthy_after: u32 = 2 => unhealthy_after: u32 = positive,
    /// How long a backend may take connections and answer no probe before it gets no more requests: a busy engine is
    /// silent, too. Every byte of an answer from it starts this time again. For SGLang also how long its answers may be
    /// silent before its health route, which runs the model, is asked.
    busy_seconds: f64 = 20.0 => busy: Duration = seconds,
    /// For SGLang: how long all streams of a backend may be silent, beyond the time that the prompts waiting there
    /// should take, while its scheduler answers no probe. Then new requests go to other backends, where there are some,
    /// until a piece or an answer comes. Each false alarm doubles it, up to `busy_seconds`.
    stall_seconds: f64 = 2.0 => stall: Duration = seconds,
    /// How often a healthy backend is asked for its version, ranks and placement, in case another engine took its
    /// place. It is also asked after it closed a connection that was in use or kept for reuse.
    identity_seconds: f64 = 30.0 => identity: Duration = seconds,
}

section! { RawRouting => RoutingConfig, "routing", "`[routing]`";
    /// Honour pins that clients send; otherwise they are removed.
    trust_client_pins: bool = false => trust_client_pins: bool = any,
    /// Bodies from this size on are scored off the threads that do network I/O.
    offload_bytes: usize = 16 << 10 => offload_bytes: usize = any,
    /// Such a body waits so long for its score at most; then it is routed by load, and counted as `slow`.
    score_limit_seconds: f64 = 0.2 => score_limit: Duration = seconds,
    /// Memory for the ids of earlier turns of chats, per model: text, ids and overhead. 0 = none.
    segment_cache_bytes: usize = 4 << 20 => segment_cache_bytes: usize = any,
    /// Header of requests that policy `sticky` keeps together by its value.
    sticky_header: String = "x-semmoe-session".to_owned() => sticky_header: http::HeaderName = header,
    /// The engines' prefix caches, as policies believe them to be.
    prefix: PrefixSettings = PrefixSettings::default() => prefix: PrefixSettings = prefix,
    /// The policies' own numbers.
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
