//! The JSON document that describes an error, in the form that a route's clients expect.

use http::StatusCode;
use semmoe_engines::Route;
use serde_json::{Value, json};

use super::Cause;

/// The API whose error format a client expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// OpenAI's API, and the engines' native routes.
    OpenAi,
    /// Anthropic's API.
    Anthropic,
}

impl Form {
    /// Returns the error form for a route's clients.
    pub(crate) fn of(route: Option<Route>) -> Self {
        match route {
            Some(Route::Messages | Route::CountTokens) => Self::Anthropic,
            _ => Self::OpenAi,
        }
    }

    /// Returns the error form for a path, whether or not its requests reach an engine.
    pub(crate) fn of_path(path: &str) -> Self {
        Self::of(Route::ALL.into_iter().find(|route| route.path() == path))
    }

    /// Returns the document for an error with this cause.
    pub(super) fn document(self, Cause { fault, status, code, .. }: Cause, message: &str) -> Value {
        match self {
            Self::OpenAi => json!({ "error": { "message": message, "type": fault, "param": null, "code": code } }),
            Self::Anthropic => {
                json!({ "type": "error", "error": { "type": anthropic(status), "message": message, "code": code } })
            }
        }
    }

    /// Inserts the request's id where clients of this form expect it.
    pub(super) fn name_request(self, document: &mut Value, id: &str) {
        match self {
            Self::OpenAi => document["error"]["request_id"] = id.into(),
            Self::Anthropic => document["request_id"] = id.into(),
        }
    }

    /// Formats the document as a stream event.
    pub(crate) fn event(self, document: &Value) -> String {
        match self {
            Self::OpenAi => format!("data: {document}\n\n"),
            Self::Anthropic => format!("event: error\ndata: {document}\n\n"),
        }
    }
}

/// Returns Anthropic's error type for this status.
fn anthropic(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    }
}
