//! The only module that maps errors to an HTTP status and JSON.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use semmoe_text::{Fault, TextError};
use serde_json::{Value, json};

use crate::unit::{SubmitError, SwitchError};

/// An error returned to the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ApiError {
    status: StatusCode,
    message: String,
    /// The invalid parameter.
    param: Option<String>,
    /// The OpenAI API's name for the error, if any; sent as `code` in place of the status.
    named: Option<&'static str>,
    /// Whether a retry may soon succeed.
    passing: bool,
}

/// Seconds that a client should wait before retrying.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

impl ApiError {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, named: None, passing: false }
    }

    /// Names the invalid parameter.
    fn about(mut self, param: &str) -> Self {
        // The client supplies the name, so its length is limited.
        self.param = Some(param.chars().take(64).collect());
        self
    }

    /// Creates an error for an invalid request parameter.
    pub(super) fn param(param: &str, message: impl Into<String>) -> Self {
        Self::bad(message).about(param)
    }

    /// Creates an error for an invalid request.
    pub(super) fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// Creates an error for a server failure.
    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// Creates an error for a server that cannot serve requests now.
    pub(super) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }

    /// Creates an error for a model that is not served; `served` is the model that is.
    pub(super) fn no_model(name: &str, served: &str) -> Self {
        // The client supplies the name, so its length is limited.
        let name: String = name.chars().take(100).collect();
        let message = format!("there is no model '{name}' (there is: {served})");
        Self { named: Some("model_not_found"), ..Self::new(StatusCode::NOT_FOUND, message) }.about("model")
    }

    /// Formats the error as `{"error": {"message", "type", "param", "code"}}`, as in the OpenAI API.
    pub(super) fn json(&self) -> Value {
        let kind = match self.status {
            StatusCode::NOT_FOUND => "not_found_error",
            status if status.is_client_error() => "invalid_request_error",
            StatusCode::SERVICE_UNAVAILABLE => "service_unavailable_error",
            _ => "internal_server_error",
        };
        let code = self.named.map_or_else(|| Value::from(self.status.as_u16()), Value::from);
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": code}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.json())).into_response();
        if self.passing {
            response.headers_mut().insert(header::RETRY_AFTER, RETRY_AFTER);
        }
        response
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        match error.fault() {
            Fault::Client => Self::bad(error.to_string()),
            Fault::Server => Self::internal(error.to_string()),
        }
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        let passing = matches!(error, SubmitError::Full { .. } | SubmitError::Stopping);
        Self { passing, ..Self::unavailable(error.to_string()) }
    }
}

impl From<SwitchError> for ApiError {
    fn from(error: SwitchError) -> Self {
        let message = error.to_string();
        match error {
            SwitchError::Busy(_) | SwitchError::Epoch { .. } | SwitchError::NotPrepared | SwitchError::Aborted => {
                Self::new(StatusCode::CONFLICT, message)
            }
            SwitchError::Refused { .. } | SwitchError::RolledBack { .. } => {
                Self::new(StatusCode::UNPROCESSABLE_ENTITY, message)
            }
            SwitchError::Late { .. } => Self { passing: true, ..Self::unavailable(message) },
            SwitchError::Unit(error) => error.into(),
        }
    }
}

/// Responds to an unknown path.
pub(super) async fn not_found(uri: axum::http::Uri) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, format!("there is no route {}", uri.path()))
}

/// Responds to a method that the route does not support.
pub(super) async fn method_not_allowed(method: axum::http::Method, uri: axum::http::Uri) -> ApiError {
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, format!("{} does not support {method}", uri.path()))
}
