//! Why the gateway cannot start, and why it answers a request itself; ONE table says with which status.

mod form;

use std::net::SocketAddr;

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::{HeaderName, HeaderValue, StatusCode, header};
use semmoe_engines::http::HttpError;
use semmoe_engines::json::ScanError;
use serde_json::Value;

use crate::compat::Incompatible;
use crate::config::ConfigError;
use crate::request_id::{REQUEST_ID, RequestId};

pub(crate) use form::Form;

/// Known values, for messages.
pub(crate) fn listed(known: impl Iterator<Item = String>) -> String {
    let known: Vec<String> = known.collect();
    if known.is_empty() { "none".to_owned() } else { known.join(", ") }
}

/// Why a gateway does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An address cannot be bound.
    #[error("cannot listen on {address} for {what}: {source}")]
    Bind {
        /// Its purpose.
        what: &'static str,
        /// The address.
        address: SocketAddr,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The policy's name or settings.
    #[error("model '{model}': {source}")]
    Policy {
        /// The model.
        model: String,
        /// The problem.
        source: semmoe_routing::PolicyError,
    },
    /// The output has no place to go.
    #[error("{key}: {} is not a directory", path.display())]
    Dir {
        /// The key.
        key: &'static str,
        /// As configured.
        path: std::path::PathBuf,
    },
    /// Certificates or keys of a listener or a backend.
    #[error("{place}: {source}")]
    Tls {
        /// A key of the configuration, or the backend.
        place: String,
        /// The problem.
        source: semmoe_engines::tls::TlsError,
    },
    /// The file with an engine's key.
    #[error("backend '{backend}': cannot use the key in {}: {cause}", path.display())]
    KeyFile {
        /// The backend.
        backend: String,
        /// The file.
        path: std::path::PathBuf,
        /// The problem.
        cause: String,
    },
    /// The system allows too few open files.
    #[error("the limit of open files (ulimit -n) is {files}, but at least {needed} are needed")]
    Files {
        /// The limit.
        files: u64,
        /// For one client.
        needed: u64,
    },
    /// A worker thread ended by a panic.
    #[error("loading stopped: {cause}")]
    Load {
        /// The runtime's message.
        cause: String,
    },
}

impl StartError {
    /// Whether it is for the user to mend the configuration or a file that it names; the rest is the machine's.
    pub fn is_input(&self) -> bool {
        !matches!(self, Self::Bind { .. } | Self::Files { .. } | Self::Load { .. })
    }
}

/// Why a request is answered by the gateway and not by an engine.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum RequestError {
    #[error("there is no route {method} {path}")]
    NoRoute { method: String, path: String },
    #[error("{path} does not take {method}")]
    Method { method: String, path: String },
    #[error("the body is longer than the limit of {limit_bytes} bytes")]
    BodyTooLong { limit_bytes: usize },
    #[error("request bodies already hold {limit_bytes} bytes, the limit for all of them together")]
    BodyMemory { limit_bytes: usize },
    #[error("the body could not be read: {cause}")]
    BodyRead { cause: String },
    #[error("the body did not arrive within {seconds} s")]
    BodyTimeout { seconds: f64 },
    #[error("the content-encoding '{found}' is not supported: gzip, deflate, zstd and br are, one at a time")]
    Coding { found: String },
    #[error("the body is not {coding}, as its content-encoding says: {cause}")]
    BodyCoding { coding: &'static str, cause: String },
    #[error(transparent)]
    BodyScan(#[from] ScanError),
    #[error("the body is not JSON: {cause}")]
    BodyJson { cause: String },
    #[error("{cause}")]
    Field { cause: String },
    #[error("the request names no model, and there are several: {known}")]
    NoModel { known: String },
    #[error("there is no model '{name}' (there are: {known})")]
    UnknownModel { name: String, known: String },
    #[error("the pin {pin} is not a rank of model '{model}'")]
    PinRange { pin: u16, model: String },
    #[error("no backend of model '{model}' can serve: {causes}")]
    NoBackend { model: String, causes: String },
    #[error("backend '{backend}' could not be reached: {}", cause.reason())]
    Unreachable { backend: String, cause: HttpError },
    #[error("backend '{backend}' broke off: {cause}")]
    Broken { backend: String, cause: String },
    #[error("backend '{backend}' did not answer in time: {}", cause.reason())]
    Slow { backend: String, cause: HttpError },
    #[error("the gateway cannot open another connection to an engine: {cause}")]
    Exhausted { cause: String },
    #[error("the gateway is shutting down")]
    Closing,
    #[error("no model has a backend that can serve")]
    NotReady,
    #[error("model '{model}' is busy: {waiting} requests are already waiting")]
    QueueFull { model: String, waiting: usize },
    #[error("model '{model}' is busy: no rank had room within {seconds} s")]
    QueueTimeout { model: String, seconds: f64 },
    #[error("gave up on backend '{backend}' before it answered: {cause}")]
    Unhealthy { backend: String, cause: String },
    #[error("{engines} engines in a row died while running this request, so it is not sent to another")]
    Suspect { engines: usize },
    #[error("{last} (attempts: {attempts}; {why})")]
    GaveUp { attempts: usize, why: &'static str, last: Box<RequestError> },
    #[error("{limit} requests are already running over HTTP/2, the limit for all connections together")]
    TooManyStreams { limit: u32 },
    #[error("the request has {found} Host headers, expected one")]
    Hosts { found: usize },
    #[error("the only supported expectation is 100-continue")]
    Expectation,
    #[error("{found} headers, more than the limit of {limit}")]
    TooManyHeaders { found: usize, limit: usize },
    #[error("an API key is required, in the header 'authorization: Bearer KEY' or 'x-api-key: KEY'")]
    KeyMissing,
    #[error("the API key is not valid for this gateway")]
    KeyWrong,
    #[error("the Host header '{found}' is not this machine's; use 127.0.0.1 or localhost")]
    ForeignHost { found: String },
    #[error("requests from pages of '{origin}' are not allowed")]
    ForeignOrigin { origin: String },
    #[error("the admin plane requires the header 'authorization: Bearer TOKEN'")]
    Token,
    #[error("there is no backend '{name}'")]
    UnknownBackend { name: String },
    #[error("{cause}")]
    TablesPath { cause: String },
    #[error("{cause}")]
    TablesInvalid { cause: String },
    #[error("{cause}")]
    TablesStorage { cause: String },
    #[error("other loads of tables did not finish within {seconds} s")]
    TablesBusy { seconds: u64 },
    #[error("backend '{backend}' has no earlier tables{}, there are generations: {known}", of(*wanted))]
    NoEarlierTables { backend: String, wanted: Option<u64>, known: String },
    #[error("the response could not be generated: {cause}")]
    Internal { cause: String },
    #[error("the old configuration stays in force: {cause}")]
    ConfigRefused { outcome: &'static str, cause: String },
    #[error("backend '{backend}' runs {engine}, whose layout cannot be switched")]
    SwitchEngine { backend: String, engine: &'static str },
    #[error("backend '{backend}' was not switched: {cause}")]
    SwitchRefused { backend: String, cause: String },
    #[error("backend '{backend}' was switched, but its new tables are not in use: {cause}")]
    SwitchedWithoutTables { backend: String, cause: Box<RequestError> },
    #[error("rejected for backend '{backend}', the old tables stay in use: {cause}")]
    TablesRefused { backend: String, cause: Incompatible },
}

fn of(generation: Option<u64>) -> String {
    generation.map_or_else(String::new, |generation| format!(" of generation {generation}"))
}

/// One row of the table: status, OpenAI's error type, and a code that programs can match.
struct Row(StatusCode, &'static str, &'static str);

const CLIENT: &str = "invalid_request_error";
const SERVER: &str = "server_error";
/// OpenAI's clients wait and try again.
const BUSY: &str = "rate_limit_error";
const UPSTREAM: &str = "upstream_error";
/// OpenAI's clients read here whether to send a request again.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

impl RequestError {
    pub(crate) fn unknown_model(name: &str, known: String) -> Self {
        // A name can be as long as a body.
        Self::UnknownModel { name: name.chars().take(100).collect(), known }
    }

    /// The one table from errors to HTTP.
    fn row(&self) -> Row {
        match self {
            Self::NoRoute { .. } => Row(StatusCode::NOT_FOUND, CLIENT, "route_not_found"),
            Self::Method { .. } => Row(StatusCode::METHOD_NOT_ALLOWED, CLIENT, "method_not_allowed"),
            Self::BodyTooLong { .. } => Row(StatusCode::PAYLOAD_TOO_LARGE, CLIENT, "body_too_long"),
            Self::BodyMemory { .. } => Row(StatusCode::SERVICE_UNAVAILABLE, BUSY, "body_memory"),
            Self::BodyRead { .. } | Self::BodyCoding { .. } => Row(StatusCode::BAD_REQUEST, CLIENT, "body_unreadable"),
            Self::Coding { .. } => Row(StatusCode::UNSUPPORTED_MEDIA_TYPE, CLIENT, "unsupported_encoding"),
            Self::BodyTimeout { .. } => Row(StatusCode::REQUEST_TIMEOUT, CLIENT, "body_timeout"),
            Self::BodyScan(_) | Self::BodyJson { .. } => Row(StatusCode::BAD_REQUEST, CLIENT, "body_not_json"),
            Self::Field { .. } => Row(StatusCode::BAD_REQUEST, CLIENT, "invalid_field"),
            Self::NoModel { .. } => Row(StatusCode::BAD_REQUEST, CLIENT, "model_missing"),
            Self::UnknownModel { .. } => Row(StatusCode::NOT_FOUND, CLIENT, "model_not_found"),
            Self::PinRange { .. } => Row(StatusCode::BAD_REQUEST, CLIENT, "invalid_pin"),
            Self::NoBackend { .. } => Row(StatusCode::SERVICE_UNAVAILABLE, SERVER, "no_backend"),
            Self::Unreachable { .. } => Row(StatusCode::SERVICE_UNAVAILABLE, UPSTREAM, "backend_unreachable"),
            Self::Broken { .. } => Row(StatusCode::BAD_GATEWAY, UPSTREAM, "backend_broke_off"),
            Self::Slow { .. } => Row(StatusCode::GATEWAY_TIMEOUT, UPSTREAM, "backend_timeout"),
            Self::Exhausted { .. } => Row(StatusCode::SERVICE_UNAVAILABLE, BUSY, "out_of_connections"),
            Self::Closing => Row(StatusCode::SERVICE_UNAVAILABLE, SERVER, "shutting_down"),
            Self::NotReady => Row(StatusCode::SERVICE_UNAVAILABLE, SERVER, "not_ready"),
            Self::QueueFull { .. } => Row(StatusCode::TOO_MANY_REQUESTS, BUSY, "queue_full"),
            Self::QueueTimeout { .. } => Row(StatusCode::TOO_MANY_REQUESTS, BUSY, "queue_timeout"),
            Self::Unhealthy { .. } => Row(StatusCode::BAD_GATEWAY, UPSTREAM, "backend_given_up"),
            Self::Suspect { .. } => Row(StatusCode::BAD_GATEWAY, UPSTREAM, "request_suspect"),
            Self::GaveUp { last, .. } => last.row(),
            Self::TooManyHeaders { .. } => Row(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, CLIENT, "too_many_headers"),
            Self::Hosts { .. } => Row(StatusCode::BAD_REQUEST, CLIENT, "invalid_host"),
            Self::Expectation => Row(StatusCode::EXPECTATION_FAILED, CLIENT, "expectation_failed"),
            Self::TooManyStreams { .. } => Row(StatusCode::SERVICE_UNAVAILABLE, SERVER, "too_many_streams"),
            Self::KeyMissing => Row(StatusCode::UNAUTHORIZED, CLIENT, "api_key_missing"),
            Self::KeyWrong => Row(StatusCode::UNAUTHORIZED, CLIENT, "invalid_api_key"),
            Self::ForeignHost { .. } => Row(StatusCode::FORBIDDEN, CLIENT, "foreign_host"),
            Self::ForeignOrigin { .. } => Row(StatusCode::FORBIDDEN, CLIENT, "foreign_origin"),
            Self::Token => Row(StatusCode::UNAUTHORIZED, CLIENT, "token_needed"),
            Self::UnknownBackend { .. } => Row(StatusCode::NOT_FOUND, CLIENT, "backend_not_found"),
            Self::TablesPath { .. } => Row(StatusCode::FORBIDDEN, CLIENT, "path_not_allowed"),
            Self::TablesInvalid { .. } => Row(StatusCode::UNPROCESSABLE_ENTITY, CLIENT, "tables_invalid"),
            Self::TablesStorage { .. } => Row(StatusCode::INSUFFICIENT_STORAGE, SERVER, "tables_not_stored"),
            Self::TablesBusy { .. } => Row(StatusCode::SERVICE_UNAVAILABLE, SERVER, "tables_busy"),
            Self::NoEarlierTables { .. } => Row(StatusCode::CONFLICT, CLIENT, "no_earlier_tables"),
            Self::Internal { .. } => Row(StatusCode::INTERNAL_SERVER_ERROR, SERVER, "internal"),
            Self::ConfigRefused { outcome: "invalid", .. } => {
                Row(StatusCode::UNPROCESSABLE_ENTITY, CLIENT, "config_invalid")
            }
            Self::ConfigRefused { .. } => Row(StatusCode::CONFLICT, CLIENT, "config_refused"),
            Self::SwitchEngine { .. } => Row(StatusCode::CONFLICT, CLIENT, "switch_engine"),
            Self::SwitchRefused { .. } => Row(StatusCode::CONFLICT, CLIENT, "switch_refused"),
            Self::SwitchedWithoutTables { .. } => Row(StatusCode::BAD_GATEWAY, UPSTREAM, "switched_without_tables"),
            Self::TablesRefused { .. } => Row(StatusCode::CONFLICT, CLIENT, "tables_refused"),
        }
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.row().0
    }

    /// The answer, with the request's id in header and body.
    pub(crate) fn respond(&self, id: &RequestId, form: Form) -> Response {
        let mut response = self.response(self.body_with(id, form));
        response.headers_mut().insert(REQUEST_ID, id.header().clone());
        response
    }

    fn response(&self, body: Value) -> Response {
        let status = self.status();
        let mut response = (status, Json(body)).into_response();
        let headers = response.headers_mut();
        match status {
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"))
            }
            // OpenAI's clients would send it again.
            _ if matches!(self, Self::Suspect { .. }) => {
                headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"))
            }
            StatusCode::UNSUPPORTED_MEDIA_TYPE => {
                headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("gzip, deflate, zstd, br"))
            }
            StatusCode::UNAUTHORIZED => headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer")),
            _ => None,
        };
        response
    }

    /// The document with the request's id.
    pub(crate) fn body_with(&self, id: &RequestId, form: Form) -> Value {
        let mut body = self.body(form);
        form.name_request(&mut body, id.as_str());
        body
    }

    fn body(&self, form: Form) -> Value {
        let Row(status, kind, code) = self.row();
        form.document(status, kind, code, &printable(&self.to_string()))
    }
}

/// With control characters escaped, C1 included: a message may repeat what a client or an engine sent, and is read on
/// terminals.
pub(crate) fn printable(text: &str) -> String {
    let mut printable = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() {
            printable.extend(character.escape_unicode());
        } else {
            printable.push(character);
        }
    }
    printable
}

impl IntoResponse for RequestError {
    fn into_response(self) -> Response {
        self.response(self.body(Form::OpenAi))
    }
}
