//! Errors to status and JSON: the one table.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use semmoe_text::{Fault, TextError};
use serde_json::{Value, json};

use crate::unit::SubmitError;

/// An error that a client sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ApiError {
    status: StatusCode,
    message: String,
}

impl ApiError {
    /// The request is wrong.
    pub(super) fn bad(message: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, message: message.into() }
    }

    /// This side is wrong.
    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self { status: StatusCode::INTERNAL_SERVER_ERROR, message: message.into() }
    }

    /// Nothing can be served now.
    pub(super) fn unavailable(message: impl Into<String>) -> Self {
        Self { status: StatusCode::SERVICE_UNAVAILABLE, message: message.into() }
    }

    /// `{"error": {"message", "type", "code"}}`, as the OpenAI API has it.
    pub(super) fn json(&self) -> Value {
        let kind = match self.status {
            StatusCode::NOT_FOUND => "not_found_error",
            status if status.is_client_error() => "invalid_request_error",
            StatusCode::SERVICE_UNAVAILABLE => "service_unavailable_error",
            _ => "internal_server_error",
        };
        json!({"error": {"message": self.message, "type": kind, "code": self.status.as_u16()}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(self.json())).into_response()
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
        Self::unavailable(error.to_string())
    }
}

/// A path that nothing answers.
pub(super) async fn not_found(uri: axum::http::Uri) -> ApiError {
    ApiError { status: StatusCode::NOT_FOUND, message: format!("there is no route {}", uri.path()) }
}

/// A route that has other methods.
pub(super) async fn method_not_allowed(method: axum::http::Method, uri: axum::http::Uri) -> ApiError {
    ApiError { status: StatusCode::METHOD_NOT_ALLOWED, message: format!("{} does not take {method}", uri.path()) }
}
