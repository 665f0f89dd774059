//! Why the gateway cannot start, and why it answers a request itself; one table maps errors to statuses.

mod form;

use std::net::SocketAddr;

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::{HeaderName, HeaderValue, StatusCode, header};
use semmoe_engines::http::{HttpError, KeyError};
use semmoe_engines::json::ScanError;
use semmoe_engines::pin::PinError;
use serde_json::Value;
use tokio::task::JoinError;

use crate::backends::compat::Incompatible;
use crate::backends::{REQUEST_ID, RequestId};
use crate::config::ConfigError;

pub(crate) use form::Form;

/// Lists the known values, for messages.
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
    /// An output folder does not exist.
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
    /// The file with an engine's key is unusable.
    #[error("backend '{backend}': cannot use the key in {}: {source}", path.display())]
    KeyFile {
        /// The backend.
        backend: String,
        /// The file.
        path: std::path::PathBuf,
        /// The problem.
        source: KeyError,
    },
    /// The system allows too few open files.
    #[error("the limit of open files (ulimit -n) is {files}, but at least {needed} are needed")]
    Files {
        /// The limit.
        files: u64,
        /// Files needed for one client.
        needed: u64,
    },
    /// A worker thread ended by a panic.
    #[error("loading stopped: {0}")]
    Load(#[from] JoinError),
}

impl StartError {
    /// Whether the user must correct the configuration or a file that it names; other errors concern the machine.
    pub fn is_input(&self) -> bool {
        !matches!(self, Self::Bind { .. } | Self::Files { .. } | Self::Load(_))
    }
}

/// Declares [`RequestError`], the one table from errors to HTTP: each with its status, OpenAI's error type, a code for
/// programs, and its message.
macro_rules! request_errors {
    ($($name:ident $({ $($field:ident: $kind:ty),* })? => $status:ident, $type:ident, $code:literal, $message:literal
        $(, $argument:expr)?;)*) => {
        /// Why the gateway rather than an engine answers a request.
        #[derive(Debug, Clone, PartialEq, thiserror::Error)]
        pub(crate) enum RequestError {
            $(#[error($message $(, $argument)?)] $name $({ $($field: $kind),* })?,)*
            #[error("{last} (attempts: {attempts}; {why})")]
            GaveUp { attempts: usize, why: &'static str, last: Box<RequestError> },
        }

        #[cfg(test)]
        const ROWS: &[(&str, StatusCode, &str)] = &[$((stringify!($name), StatusCode::$status, $type),)*];

        impl RequestError {
            fn row(&self) -> Row {
                match self {
                    Self::GaveUp { last, .. } => last.row(),
                    Self::ConfigRefused { outcome: "invalid", .. } => {
                        Row(StatusCode::UNPROCESSABLE_ENTITY, CLIENT, "config_invalid")
                    }
                    $(Self::$name { .. } => Row(StatusCode::$status, $type, $code),)*
                }
            }
        }
    };
}

request_errors! {
    NoRoute { method: String, path: String } => NOT_FOUND, CLIENT, "route_not_found",
        "there is no route {method} {path}";
    Method { method: String, path: String } => METHOD_NOT_ALLOWED, CLIENT, "method_not_allowed",
        "{path} does not take {method}";
    BodyTooLong { limit_bytes: usize } => PAYLOAD_TOO_LARGE, CLIENT, "body_too_long",
        "the body is longer than the limit of {limit_bytes} bytes";
    BodyMemory { limit_bytes: usize } => SERVICE_UNAVAILABLE, BUSY, "body_memory",
        "request bodies already hold {limit_bytes} bytes, the limit for all of them together";
    BodyRead { cause: String } => BAD_REQUEST, CLIENT, "body_unreadable", "the body could not be read: {cause}";
    BodyTimeout { seconds: f64 } => REQUEST_TIMEOUT, CLIENT, "body_timeout",
        "the body did not arrive within {seconds} s";
    Coding { found: String } => UNSUPPORTED_MEDIA_TYPE, CLIENT, "unsupported_encoding",
        "the content-encoding '{found}' is not supported: gzip, deflate, zstd and br are, one at a time";
    BodyCoding { coding: &'static str, cause: String } => BAD_REQUEST, CLIENT, "body_unreadable",
        "the body is not {coding}, as its content-encoding says: {cause}";
    BodyScan { cause: ScanError } => BAD_REQUEST, CLIENT, "body_not_json", "{cause}";
    BodyJson { cause: String } => BAD_REQUEST, CLIENT, "body_not_json", "the body is not JSON: {cause}";
    Field { cause: String } => BAD_REQUEST, CLIENT, "invalid_field", "{cause}";
    NoModel { known: String } => BAD_REQUEST, CLIENT, "model_missing",
        "the request names no model, and there are several: {known}";
    UnknownModel { name: String, known: String } => NOT_FOUND, CLIENT, "model_not_found",
        "there is no model '{name}' (there are: {known})";
    PinRange { pin: u16, model: String } => BAD_REQUEST, CLIENT, "invalid_pin",
        "the pin {pin} is not a rank of model '{model}'";
    NoBackend { model: String, causes: String } => SERVICE_UNAVAILABLE, SERVER, "no_backend",
        "no backend of model '{model}' can serve: {causes}";
    Unreachable { backend: String, cause: HttpError } => SERVICE_UNAVAILABLE, UPSTREAM, "backend_unreachable",
        "backend '{backend}' could not be reached: {}", cause.reason();
    Broken { backend: String, cause: String } => BAD_GATEWAY, UPSTREAM, "backend_broke_off",
        "backend '{backend}' broke off: {cause}";
    Slow { backend: String, cause: HttpError } => GATEWAY_TIMEOUT, UPSTREAM, "backend_timeout",
        "backend '{backend}' did not answer in time: {}", cause.reason();
    Exhausted { cause: String } => SERVICE_UNAVAILABLE, BUSY, "out_of_connections",
        "the gateway cannot open another connection to an engine: {cause}";
    Closing => SERVICE_UNAVAILABLE, SERVER, "shutting_down", "the gateway is shutting down";
    NotReady => SERVICE_UNAVAILABLE, SERVER, "not_ready", "no model has a backend that can serve";
    QueueFull { model: String, waiting: usize } => TOO_MANY_REQUESTS, BUSY, "queue_full",
        "model '{model}' is busy: {waiting} requests are already waiting";
    QueueTimeout { model: String, seconds: f64 } => TOO_MANY_REQUESTS, BUSY, "queue_timeout",
        "model '{model}' is busy: no rank had room within {seconds} s";
    Unhealthy { backend: String, cause: String } => BAD_GATEWAY, UPSTREAM, "backend_given_up",
        "gave up on backend '{backend}' before it answered: {cause}";
    Suspect { engines: usize } => BAD_GATEWAY, UPSTREAM, "request_suspect",
        "{engines} engines in a row died while running this request, so it is not sent to another";
    TooManyStreams { limit: u32 } => SERVICE_UNAVAILABLE, SERVER, "too_many_streams",
        "{limit} requests are already running over HTTP/2, the limit for all connections together";
    Hosts { found: usize } => BAD_REQUEST, CLIENT, "invalid_host",
        "the request has {found} Host headers, expected one";
    Expectation => EXPECTATION_FAILED, CLIENT, "expectation_failed", "the only supported expectation is 100-continue";
    TooManyHeaders { found: usize, limit: usize } => REQUEST_HEADER_FIELDS_TOO_LARGE, CLIENT, "too_many_headers",
        "{found} headers, more than the limit of {limit}";
    KeyMissing => UNAUTHORIZED, CLIENT, "api_key_missing",
        "an API key is required, in the header 'authorization: Bearer KEY' or 'x-api-key: KEY'";
    KeyWrong => UNAUTHORIZED, CLIENT, "invalid_api_key", "the API key is not valid for this gateway";
    ForeignHost { found: String } => FORBIDDEN, CLIENT, "foreign_host",
        "the Host header '{found}' is not this machine's; use 127.0.0.1 or localhost";
    ForeignOrigin { origin: String } => FORBIDDEN, CLIENT, "foreign_origin",
        "requests from pages of '{origin}' are not allowed";
    Token => UNAUTHORIZED, CLIENT, "token_needed",
        "the admin plane requires the header 'authorization: Bearer TOKEN'";
    UnknownBackend { name: String } => NOT_FOUND, CLIENT, "backend_not_found", "there is no backend '{name}'";
    TablesPath { cause: String } => FORBIDDEN, CLIENT, "path_not_allowed", "{cause}";
    TablesInvalid { cause: String } => UNPROCESSABLE_ENTITY, CLIENT, "tables_invalid", "{cause}";
    TablesStorage { cause: String } => INSUFFICIENT_STORAGE, SERVER, "tables_not_stored", "{cause}";
    TablesBusy { seconds: u64 } => SERVICE_UNAVAILABLE, SERVER, "tables_busy",
        "other loads of tables did not finish within {seconds} s";
    NoEarlierTables { backend: String, wanted: Option<u64>, known: String } => CONFLICT, CLIENT, "no_earlier_tables",
        "backend '{backend}' has no earlier tables{}, there are generations: {known}", of(*wanted);
    Internal { cause: String } => INTERNAL_SERVER_ERROR, SERVER, "internal",
        "the response could not be generated: {cause}";
    ConfigRefused { outcome: &'static str, cause: String } => CONFLICT, CLIENT, "config_refused",
        "the old configuration stays in force: {cause}";
    SwitchEngine { backend: String, engine: &'static str } => CONFLICT, CLIENT, "switch_engine",
        "backend '{backend}' runs {engine}, whose layout cannot be switched";
    SwitchRefused { backend: String, cause: String } => CONFLICT, CLIENT, "switch_refused",
        "backend '{backend}' was not switched: {cause}";
    SwitchFailed { backend: String, cause: String } => BAD_GATEWAY, UPSTREAM, "switch_failed",
        "backend '{backend}' was not switched: {cause}";
    SwitchedWithoutTables { backend: String, cause: Box<RequestError> } =>
        BAD_GATEWAY, UPSTREAM, "switched_without_tables",
        "backend '{backend}' was switched, but its new tables are not in use: {cause}";
    TablesRefused { backend: String, cause: Incompatible } => CONFLICT, CLIENT, "tables_refused",
        "rejected for backend '{backend}', the old tables stay in use: {cause}";
}

impl From<ScanError> for RequestError {
    fn from(cause: ScanError) -> Self {
        Self::BodyScan { cause }
    }
}

/// A pin that cannot be sent was the gateway's choice; any other is the client's.
impl From<PinError> for RequestError {
    fn from(error: PinError) -> Self {
        let cause = error.to_string();
        if matches!(error, PinError::NoCarrier { .. }) { Self::Internal { cause } } else { Self::Field { cause } }
    }
}

/// A task of the gateway panicked.
impl From<JoinError> for RequestError {
    fn from(error: JoinError) -> Self {
        Self::Internal { cause: error.to_string() }
    }
}

fn of(generation: Option<u64>) -> String {
    generation.map_or_else(String::new, |generation| format!(" of generation {generation}"))
}

/// A row of the table without the message.
struct Row(StatusCode, &'static str, &'static str);

const CLIENT: &str = "invalid_request_error";
const SERVER: &str = "server_error";
/// OpenAI's clients wait and retry.
const BUSY: &str = "rate_limit_error";
const UPSTREAM: &str = "upstream_error";
/// Tells OpenAI's clients whether to retry a request.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

impl RequestError {
    pub(crate) fn unknown_model(name: &str, known: String) -> Self {
        // A name can be as long as a body.
        Self::UnknownModel { name: name.chars().take(100).collect(), known }
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
            // OpenAI's clients would retry it.
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

/// Escapes control characters, C1 included: a message may repeat what a client or an engine sent, and terminals display
/// it.
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

#[cfg(test)]
mod tests {
    use semmoe_engines::{Engine, Route};

    use super::*;

    #[test]
    fn only_clients_faults_are_4xx() {
        for (name, status, kind) in ROWS {
            let fits = match *kind {
                CLIENT => status.is_client_error(),
                // Clients are told to wait.
                BUSY => [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE].contains(status),
                _ => status.is_server_error(),
            };
            assert!(fits, "{name}: {status} as {kind}");
        }
    }

    #[tokio::test]
    async fn faults_of_the_gateway_are_500() {
        let panicked = tokio::spawn(async { panic!("planted") }).await.unwrap_err();
        let pin = PinError::NoCarrier { engine: Engine::Openai, route: Route::Chat };
        for error in [RequestError::from(panicked), RequestError::from(pin)] {
            assert_eq!(error.status(), StatusCode::INTERNAL_SERVER_ERROR, "{error}");
        }
        let pin = PinError::NotARank { found: "x".to_owned() };
        assert_eq!(RequestError::from(pin).status(), StatusCode::BAD_REQUEST, "the client's");
    }
}
