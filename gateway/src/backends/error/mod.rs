//! Reasons that prevent the gateway from starting, and errors that it reports to clients; one table maps errors to
//! statuses.

mod form;

use std::net::SocketAddr;

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::{HeaderName, HeaderValue, StatusCode, header};
use semmoe_engines::SharedError;
use semmoe_engines::http::{HttpError, KeyError, UrlError};
use semmoe_engines::json::ScanError;
use semmoe_engines::pin::PinError;
use serde::Serialize;
use serde_json::Value;
use tokio::task::JoinError;

use crate::backends::compat::Incompatible;
use crate::backends::{REQUEST_ID, RequestId};
use crate::config::ConfigError;

pub(crate) use form::Form;

/// Lists the known values, for use in messages.
pub(crate) fn listed(known: impl Iterator<Item = String>) -> String {
    let known: Vec<String> = known.collect();
    if known.is_empty() { "none".to_owned() } else { known.join(", ") }
}

/// Why the gateway does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Binding an address failed.
    #[error("cannot listen on {address} for {what}: {source}")]
    Bind {
        /// Its purpose.
        what: &'static str,
        /// The address.
        address: SocketAddr,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The policy's name or settings are invalid.
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
    /// The certificates or keys of a listener or backend are unusable.
    #[error("{place}: {source}")]
    Tls {
        /// The configuration key, or the backend.
        place: String,
        /// The problem.
        source: semmoe_engines::tls::TlsError,
    },
    /// The file with an engine's API key is unusable.
    #[error("backend '{backend}': cannot use the key in {}: {source}", path.display())]
    KeyFile {
        /// The backend.
        backend: String,
        /// The file.
        path: std::path::PathBuf,
        /// The problem.
        source: KeyError,
    },
    /// The system's limit on open files is too low.
    #[error("the limit on open files (ulimit -n) is {files}, but at least {needed} are needed")]
    Files {
        /// The limit.
        files: u64,
        /// Number of files needed to serve one client.
        needed: u64,
    },
    /// A loading thread panicked.
    #[error("loading stopped: {0}")]
    Load(#[from] JoinError),
}

impl StartError {
    /// Whether the user must correct the configuration or a file that it names. All other errors concern the machine.
    pub fn is_input(&self) -> bool {
        !matches!(self, Self::Bind { .. } | Self::Files { .. } | Self::Load(_))
    }
}

/// The party at fault, with OpenAI's name for the error type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum Fault {
    /// The client, which must send a different request.
    #[serde(rename = "invalid_request_error")]
    Client,
    /// All clients together, by sending too many concurrent requests. OpenAI's clients wait and retry.
    #[serde(rename = "rate_limit_error")]
    Load,
    /// The engine, or the connection to it.
    #[serde(rename = "upstream_error")]
    Engine,
    /// The gateway, or its operator.
    #[serde(rename = "server_error")]
    Gateway,
}

/// One row of the error table, without the message.
#[derive(Clone, Copy)]
struct Cause {
    fault: Fault,
    /// Whether an identical request may succeed later.
    retryable: bool,
    status: StatusCode,
    code: &'static str,
}

impl Cause {
    /// Evaluated at compile time: a row whose status contradicts its party at fault does not compile.
    const fn new(fault: Fault, retryable: bool, status: StatusCode, code: &'static str) -> Self {
        let number = status.as_u16();
        let fits = match fault {
            Fault::Client => number / 100 == 4 && number != 429 && !retryable,
            Fault::Load => (number == 429 || number == 503) && retryable,
            Fault::Engine | Fault::Gateway => number / 100 == 5,
        };
        assert!(fits, "the status contradicts the party at fault");
        Self { fault, retryable, status, code }
    }
}

const RETRY: bool = true;
const FINAL: bool = false;

/// Declares [`RequestError`], the one table that maps errors to HTTP. Each row has the party at fault, whether an
/// identical request may succeed later, the status, a machine-readable code, and the message.
macro_rules! request_errors {
    ($($name:ident $({ $($(#[$from:meta])? $field:ident: $kind:ty),* })? => $fault:ident $retry:ident $status:ident,
        $code:literal, $message:literal $(, $argument:expr)?;)*) => {
        /// Why the gateway answers a request itself instead of an engine.
        #[derive(Debug, Clone, PartialEq, thiserror::Error)]
        pub(crate) enum RequestError {
            $(#[error($message $(, $argument)?)] $name $({ $($(#[$from])? $field: $kind),* })?,)*
            #[error("{source} (attempts: {attempts}; {why})")]
            GaveUp { attempts: usize, why: &'static str, source: Box<RequestError> },
        }

        impl RequestError {
            fn cause(&self) -> Cause {
                match self {
                    Self::GaveUp { source, .. } => source.cause(),
                    $(Self::$name { .. } => const { Cause::new(Fault::$fault, $retry, StatusCode::$status, $code) },)*
                }
            }
        }
    };
}

request_errors! {
    NoRoute { method: String, path: String } => Client FINAL NOT_FOUND, "route_not_found",
        "there is no route {method} {path}";
    Method { method: String, path: String } => Client FINAL METHOD_NOT_ALLOWED, "method_not_allowed",
        "{path} does not accept {method}";
    BodyTooLong { limit_bytes: usize } => Client FINAL PAYLOAD_TOO_LARGE, "body_too_long",
        "the body is longer than the limit of {limit_bytes} bytes";
    BodyMemory { limit_bytes: usize } => Load RETRY SERVICE_UNAVAILABLE, "body_memory",
        "request bodies already use the combined limit of {limit_bytes} bytes";
    BodyRead { source: SharedError } => Client FINAL BAD_REQUEST, "body_unreadable", "the body could not be read: {source}";
    BodyTimeout { seconds: f64 } => Client FINAL REQUEST_TIMEOUT, "body_timeout",
        "the body was not received within {seconds} s";
    Coding { found: String } => Client FINAL UNSUPPORTED_MEDIA_TYPE, "unsupported_encoding",
        "unsupported content-encoding '{found}', expected one of gzip, deflate, zstd and br";
    BodyCoding { coding: &'static str, source: SharedError } => Client FINAL BAD_REQUEST, "body_unreadable",
        "the body is not {coding}, contrary to its content-encoding: {source}";
    BodyScan { #[from] source: ScanError } => Client FINAL BAD_REQUEST, "body_not_json", "{source}";
    BodyJson { source: SharedError } => Client FINAL BAD_REQUEST, "body_not_json", "the body is not JSON: {source}";
    Field { source: SharedError } => Client FINAL BAD_REQUEST, "invalid_field", "{source}";
    Command { expected: String, source: SharedError } => Client FINAL BAD_REQUEST, "invalid_field",
        "{source}: expected JSON {expected}";
    Query { source: UrlError } => Client FINAL BAD_REQUEST, "invalid_field", "the query cannot be sent to an engine";
    NoModel { known: String } => Client FINAL BAD_REQUEST, "model_missing",
        "the request does not specify a model, and there are several: {known}";
    UnknownModel { name: String, known: String } => Client FINAL NOT_FOUND, "model_not_found",
        "there is no model '{name}' (available: {known})";
    PinRange { pin: u16, model: String } => Client FINAL BAD_REQUEST, "invalid_pin",
        "pin {pin} is not a rank of model '{model}'";
    NoBackend { model: String, causes: String } => Gateway RETRY SERVICE_UNAVAILABLE, "no_backend",
        "no backend of model '{model}' can serve: {causes}";
    Unreachable { backend: String, source: HttpError } => Engine RETRY SERVICE_UNAVAILABLE, "backend_unreachable",
        "backend '{backend}' could not be reached: {}", source.reason();
    Broken { backend: String, source: HttpError } => Engine RETRY BAD_GATEWAY, "backend_broke_off",
        "backend '{backend}' broke off: {}", source.reason();
    BrokeOff { backend: String, source: SharedError } => Engine RETRY BAD_GATEWAY, "backend_broke_off",
        "backend '{backend}' broke off: {source}";
    NoSuchRank { backend: String, rank: u32 } => Engine RETRY BAD_GATEWAY, "backend_broke_off",
        "backend '{backend}' broke off: it has no rank {rank}, to which the request was pinned";
    Slow { backend: String, source: HttpError } => Engine RETRY GATEWAY_TIMEOUT, "backend_timeout",
        "backend '{backend}' did not answer in time: {}", source.reason();
    Exhausted { source: SharedError } => Load RETRY SERVICE_UNAVAILABLE, "out_of_connections",
        "the gateway cannot open another connection to an engine: {source}";
    Closing => Gateway RETRY SERVICE_UNAVAILABLE, "shutting_down", "the gateway is shutting down";
    NotReady => Gateway RETRY SERVICE_UNAVAILABLE, "not_ready", "no model has a backend that can serve";
    QueueFull { model: String, waiting: usize } => Load RETRY TOO_MANY_REQUESTS, "queue_full",
        "model '{model}' is busy: {waiting} requests are already waiting";
    QueueTimeout { model: String, seconds: f64 } => Load RETRY TOO_MANY_REQUESTS, "queue_timeout",
        "model '{model}' is busy: no rank had room within {seconds} s";
    Unhealthy { backend: String, cause: String } => Engine RETRY BAD_GATEWAY, "backend_given_up",
        "gave up on backend '{backend}' before it answered: {cause}";
    Suspect { engines: usize } => Engine FINAL BAD_GATEWAY, "request_suspect",
        "{engines} consecutive engines died while running this request, so it is not retried on another";
    TooManyStreams { limit: u32 } => Gateway RETRY SERVICE_UNAVAILABLE, "too_many_streams",
        "{limit} requests are already running over HTTP/2, the limit across all connections";
    Hosts { found: usize } => Client FINAL BAD_REQUEST, "invalid_host",
        "the request has {found} Host headers, expected one";
    Expectation => Client FINAL EXPECTATION_FAILED, "expectation_failed", "the only supported expectation is 100-continue";
    TooManyHeaders { found: usize, limit: usize } => Client FINAL REQUEST_HEADER_FIELDS_TOO_LARGE, "too_many_headers",
        "{found} headers, more than the limit of {limit}";
    KeyMissing => Client FINAL UNAUTHORIZED, "api_key_missing",
        "an API key is required, in the header 'authorization: Bearer KEY' or 'x-api-key: KEY'";
    KeyWrong => Client FINAL UNAUTHORIZED, "invalid_api_key", "the API key is not valid for this gateway";
    ForeignHost { found: String } => Client FINAL FORBIDDEN, "foreign_host",
        "the Host header '{found}' does not name this machine; use 127.0.0.1 or localhost";
    ForeignOrigin { origin: String } => Client FINAL FORBIDDEN, "foreign_origin",
        "requests from web pages at '{origin}' are not allowed";
    Token => Client FINAL UNAUTHORIZED, "token_needed",
        "the admin plane requires the header 'authorization: Bearer TOKEN'";
    UnknownBackend { name: String } => Client FINAL NOT_FOUND, "backend_not_found", "there is no backend '{name}'";
    TablesPath { source: SharedError } => Client FINAL FORBIDDEN, "path_not_allowed", "{source}";
    TablesInvalid { source: SharedError } => Client FINAL UNPROCESSABLE_ENTITY, "tables_invalid", "{source}";
    TablesStorage { source: SharedError } => Gateway RETRY INSUFFICIENT_STORAGE, "tables_not_stored", "{source}";
    TablesBusy { seconds: u64 } => Gateway RETRY SERVICE_UNAVAILABLE, "tables_busy",
        "other table loads did not finish within {seconds} s";
    NoEarlierTables { backend: String, wanted: Option<u64>, known: String } => Client FINAL CONFLICT, "no_earlier_tables",
        "backend '{backend}' has no earlier tables{} (available generations: {known})", of(*wanted);
    Internal { source: SharedError } => Gateway RETRY INTERNAL_SERVER_ERROR, "internal",
        "the response could not be generated: {source}";
    ConfigInvalid { source: SharedError } => Client FINAL UNPROCESSABLE_ENTITY, "config_invalid",
        "the old configuration stays in effect: {source}";
    ConfigRefused { source: SharedError } => Client FINAL CONFLICT, "config_refused",
        "the old configuration stays in effect: {source}";
    ConfigFailed { source: SharedError } => Gateway RETRY INTERNAL_SERVER_ERROR, "config_failed",
        "the old configuration stays in effect: {source}";
    SwitchEngine { backend: String, engine: &'static str } => Client FINAL CONFLICT, "switch_engine",
        "backend '{backend}' runs {engine}, whose layout cannot be switched";
    SwitchRefused { backend: String, source: HttpError } => Client FINAL CONFLICT, "switch_refused",
        "backend '{backend}' was not switched: {}", source.reason();
    SwitchFailed { backend: String, source: HttpError } => Engine RETRY BAD_GATEWAY, "switch_failed",
        "backend '{backend}' was not switched: {}", source.reason();
    SwitchedWithoutTables { backend: String, source: Box<RequestError> } =>
        Engine RETRY BAD_GATEWAY, "switched_without_tables",
        "backend '{backend}' was switched, but its new tables are not in use: {source}";
    TablesRefused { backend: String, source: Incompatible } => Client FINAL CONFLICT, "tables_refused",
        "rejected for backend '{backend}', the old tables stay in use: {source}";
}

/// Blames an unsendable pin on the gateway, which chose it, and any other pin error on the client.
impl From<PinError> for RequestError {
    fn from(error: PinError) -> Self {
        let is_own = matches!(error, PinError::NoCarrier { .. });
        let source = error.into();
        if is_own { Self::Internal { source } } else { Self::Field { source } }
    }
}

/// A panic in one of the gateway's tasks.
impl From<JoinError> for RequestError {
    fn from(error: JoinError) -> Self {
        Self::Internal { source: error.into() }
    }
}

fn of(generation: Option<u64>) -> String {
    generation.map_or_else(String::new, |generation| format!(" of generation {generation}"))
}

/// Header that instructs OpenAI's clients whether to retry a request.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

impl RequestError {
    pub(crate) fn unknown_model(name: &str, known: String) -> Self {
        // A name can be as long as a request body.
        Self::UnknownModel { name: name.chars().take(100).collect(), known }
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.cause().status
    }

    /// Returns the response, with the request's id in header and body.
    pub(crate) fn respond(&self, id: &RequestId, form: Form) -> Response {
        let mut response = self.response(self.body_with(id, form));
        response.headers_mut().insert(REQUEST_ID, id.header().clone());
        response
    }

    fn response(&self, body: Value) -> Response {
        let Cause { retryable, status, .. } = self.cause();
        let mut response = (status, Json(body)).into_response();
        let headers = response.headers_mut();
        match status {
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"))
            }
            // OpenAI's clients would retry it otherwise.
            _ if status.is_server_error() && !retryable => {
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

    /// Returns the error document with the request's id.
    pub(crate) fn body_with(&self, id: &RequestId, form: Form) -> Value {
        let mut body = self.body(form);
        form.name_request(&mut body, id.as_str());
        body
    }

    fn body(&self, form: Form) -> Value {
        let cause = self.cause();
        form.document(cause, &printable(&self.to_string()))
    }
}

/// Escapes control characters, including C1: a message may repeat text from a client or an engine, and terminals
/// display it.
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
    use std::time::Duration;

    use semmoe_engines::{Engine, Route};

    use super::*;

    /// The status of a planted error of each side, as its client sees it.
    #[tokio::test]
    async fn the_status_names_the_side_at_fault() {
        let panicked = tokio::spawn(async { panic!("planted") }).await.unwrap_err();
        let no_carrier = PinError::NoCarrier { engine: Engine::Openai, route: Route::Chat };
        let no_pin = PinError::NotARank("x".to_owned());
        let source = HttpError::Timeout { url: String::new(), waiting_for: "the head", limit: Duration::ZERO };
        let slow = RequestError::Slow { backend: "b".to_owned(), source };
        for (error, fault, status) in [
            (RequestError::from(panicked), Fault::Gateway, 500),
            (RequestError::from(no_carrier), Fault::Gateway, 500),
            (slow.clone(), Fault::Engine, 504),
            (RequestError::GaveUp { attempts: 2, why: "", source: Box::new(slow) }, Fault::Engine, 504),
            (RequestError::Suspect { engines: 2 }, Fault::Engine, 502),
            (RequestError::QueueFull { model: String::new(), waiting: 1 }, Fault::Load, 429),
            (RequestError::from(no_pin), Fault::Client, 400),
        ] {
            let cause = error.cause();
            let response = error.clone().into_response();
            assert_eq!((cause.fault, response.status().as_u16()), (fault, status), "{error}");
            let again = response.headers().get(SHOULD_RETRY).is_none() && fault != Fault::Client;
            assert_eq!(cause.retryable, again, "{error}");
        }
    }

    #[test]
    #[should_panic(expected = "contradicts the party at fault")]
    fn a_client_is_not_blamed_for_the_gateway() {
        Cause::new(Fault::Gateway, RETRY, StatusCode::BAD_REQUEST, "planted");
    }

    #[test]
    #[should_panic(expected = "contradicts the party at fault")]
    fn the_gateway_is_not_blamed_for_a_client() {
        Cause::new(Fault::Client, FINAL, StatusCode::INTERNAL_SERVER_ERROR, "planted");
    }
}
