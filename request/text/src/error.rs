//! Errors of conversions between text and token ids, and whether client or server is at fault.

use std::path::PathBuf;

use serde_json::Value;

use crate::jinja::SyntaxError;

/// The party that must act on an error.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fault {
    /// The request is wrong; the response is a 400.
    Client,
    /// A file, a template or a library is wrong; the response is a 500, or the server does not start.
    Server,
}

/// An error of this crate; every message is one sentence.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A file could not be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A file is larger than any tokenizer or template.
    #[error("{path} has {bytes} bytes, more than the {limit} allowed for such a file")]
    FileTooLarge {
        /// The file.
        path: PathBuf,
        /// Size of the file.
        bytes: u64,
        /// Maximum size of such a file.
        limit: u64,
    },
    /// The file is not a valid tokenizer.
    #[error("not a usable tokenizer: {reason}")]
    Tokenizer {
        /// The parser's message.
        reason: String,
    },
    /// Encoding the text requires the engines' library, which was released.
    #[error("encoding the text requires the reference tokenizer library, which is not loaded")]
    OracleAway,
    /// A tokenizer file has changed since it was read.
    #[error("{path} now contains a different tokenizer: its SHA-256 is {found}, expected {expected}")]
    TokenizerChanged {
        /// The file.
        path: PathBuf,
        /// SHA-256 of the tokenizer in the file.
        found: String,
        /// The SHA-256 of the tokenizer in use.
        expected: String,
    },
    /// A tokenizer failed on a text or on ids.
    #[error("the tokenizer failed to {action}: {reason}")]
    Tokenize {
        /// "encode" or "decode".
        action: &'static str,
        /// The library's message.
        reason: String,
    },
    /// A `tokenizer_config.json` is not JSON, or its template has the wrong type.
    #[error("not a usable tokenizer configuration: {reason}")]
    TemplateConfig {
        /// The problem.
        reason: String,
    },
    /// A chat template has a syntax error.
    #[error("cannot parse the chat template: {reason}")]
    TemplateSyntax {
        /// The error and its line.
        #[source]
        reason: SyntaxError,
    },
    /// A chat template rejected the messages (`raise_exception`) or failed to render them.
    #[error("the chat template cannot render these messages: {reason}")]
    TemplateRender {
        /// The template's own message, or an error that Jinja2 also raises.
        reason: String,
    },
    /// Rendering a chat exceeds its budget.
    #[error("the chat template exceeds the limit of {limit} {what}")]
    TemplateBudget {
        /// The quantity.
        what: &'static str,
        /// Maximum of the quantity for one chat.
        limit: u64,
    },
    /// The request is a chat, but the model has no chat template.
    #[error("the model has no chat template, so chat requests cannot be rendered")]
    NoTemplate,
    /// A field of a request is missing or has the wrong type.
    #[error("{field} must be {expected}, found {found}")]
    Field {
        /// The field, as a path into the body.
        field: String,
        /// The expected value.
        expected: &'static str,
        /// The value found.
        found: String,
    },
    /// Token ids are in a spelling that is unsupported here, but that an engine may accept.
    #[error("{field} must be {expected}, found {found}")]
    Ids {
        /// The field, as a path into the body.
        field: String,
        /// The expected value.
        expected: &'static str,
        /// The value found.
        found: String,
    },
    /// The caller stopped the encoding of a long text.
    #[error("encoding was stopped after {done_bytes} of {all_bytes} bytes")]
    GivenUp {
        /// Bytes encoded so far.
        done_bytes: usize,
        /// Length of the text in bytes.
        all_bytes: usize,
    },
    /// A request is larger than the limit.
    #[error("{field} has {found} {unit}, more than the {limit} allowed")]
    TooLarge {
        /// The field.
        field: &'static str,
        /// Size of the field.
        found: usize,
        /// The unit of the size.
        unit: &'static str,
        /// Maximum size of the field.
        limit: usize,
    },
}

impl TextError {
    /// Returns the party that must act on this error. If a template rejects the messages, the client is at fault;
    /// engines also return 400.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Field { .. }
            | Self::Ids { .. }
            | Self::TooLarge { .. }
            | Self::TemplateRender { .. }
            | Self::TemplateBudget { .. }
            | Self::NoTemplate => Fault::Client,
            Self::Read { .. }
            | Self::GivenUp { .. }
            | Self::FileTooLarge { .. }
            | Self::Tokenizer { .. }
            | Self::OracleAway
            | Self::TokenizerChanged { .. }
            | Self::Tokenize { .. }
            | Self::TemplateConfig { .. }
            | Self::TemplateSyntax { .. } => Fault::Server,
        }
    }
}

/// Creates a [`TextError::Field`] that names the JSON type found.
pub(crate) fn field(field: &str, expected: &'static str, found: &Value) -> TextError {
    let found = match found {
        Value::Null => "nothing",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(items) if items.is_empty() => "an empty list",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    TextError::Field { field: field.to_owned(), expected, found: found.to_owned() }
}
