//! The error type of this crate.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

/// Errors from reading or writing a file, or from data that would not form a valid file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The operating system reported an error.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The file concerned.
        path: PathBuf,
        /// The attempted action ("open", "write", ...).
        action: &'static str,
        /// The cause.
        source: std::io::Error,
    },
    /// An error in the content of a file, with the file's path.
    #[error("{}: {source}", path.display())]
    File {
        /// The file concerned.
        path: PathBuf,
        /// The error in the content.
        source: Box<FormatError>,
    },
    /// The safetensors container is damaged.
    #[error("not a valid safetensors container: {what}: found {found}, expected {expected}")]
    Container {
        /// The part that is wrong.
        what: Cow<'static, str>,
        /// The value found.
        found: String,
        /// The expected value.
        expected: String,
    },
    /// The header is not valid JSON of the expected form.
    #[error("not a valid safetensors container: the header is not a safetensors header: {0}")]
    Header(#[source] serde_json::Error),
    /// The file has a different format.
    #[error("the format is {found:?}, expected {expected:?}")]
    WrongFormat {
        /// The file's `format`.
        found: String,
        /// The format requested.
        expected: &'static str,
    },
    /// The file's version is unknown to this program.
    #[error("version {found:?} of {format} is not supported, expected {expected:?}")]
    UnknownVersion {
        /// The file's format.
        format: &'static str,
        /// The file's `version`.
        found: String,
        /// The version that this program reads.
        expected: &'static str,
    },
    /// A metadata field is absent.
    #[error("the metadata field `{0}` is missing")]
    MissingField(&'static str),
    /// A metadata field, or a field of a value passed to a builder, is invalid.
    #[error("the field `{field}` is {found}, expected {expected}")]
    BadField {
        /// The field.
        field: &'static str,
        /// Value of the field.
        found: String,
        /// The values allowed.
        expected: String,
    },
    /// A tensor is absent.
    #[error("the tensor `{0}` is missing")]
    MissingTensor(&'static str),
    /// The format does not define this tensor.
    #[error("the tensor `{tensor}` does not belong in {format}")]
    UnexpectedTensor {
        /// The tensor.
        tensor: String,
        /// The file's format.
        format: &'static str,
    },
    /// A tensor has the wrong element type.
    #[error("the tensor `{tensor}` is {found}, expected {expected}")]
    WrongDtype {
        /// The tensor.
        tensor: &'static str,
        /// Element type of the tensor.
        found: String,
        /// The required element type.
        expected: String,
    },
    /// A tensor or slice has the wrong shape.
    #[error("the tensor `{tensor}` has shape {found}, expected {expected}")]
    WrongShape {
        /// The tensor.
        tensor: &'static str,
        /// Shape of the tensor.
        found: String,
        /// The required shape.
        expected: String,
    },
    /// A value inside a tensor is invalid.
    #[error("the tensor `{tensor}` holds {found} at {at}, expected {expected}")]
    BadValue {
        /// The tensor.
        tensor: &'static str,
        /// The position in words, such as "layer 3, token 17".
        at: String,
        /// The value.
        found: String,
        /// The values allowed.
        expected: String,
    },
    /// Two files, or a file and an engine, belong to different models.
    #[error("different models: `{field}` is {found} in one and {expected} in the other")]
    ModelMismatch {
        /// The first field that differs.
        field: &'static str,
        /// The field's value in `self`.
        found: String,
        /// The field's value in the other model.
        expected: String,
    },
    /// Two profiles cover different phases.
    #[error("the profile's phase is {found}, expected {expected}")]
    PhaseMismatch {
        /// The phase given.
        found: crate::Phase,
        /// The phase required.
        expected: crate::Phase,
    },
    /// A count does not fit into its type.
    #[error("the count of {what} does not fit into {bits} bits")]
    CountOverflow {
        /// The quantity counted.
        what: String,
        /// The width of the counter.
        bits: u32,
    },
}

impl FormatError {
    /// Adds the file's path to an error that does not name a file yet.
    #[must_use]
    pub fn in_file(self, path: &Path) -> Self {
        match self {
            FormatError::Io { .. } | FormatError::File { .. } => self,
            other => FormatError::File { path: path.to_path_buf(), source: Box::new(other) },
        }
    }

    pub(crate) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        FormatError::Io { path: path.to_path_buf(), action, source }
    }

    pub(crate) fn field(field: &'static str, found: impl ToString, expected: impl ToString) -> Self {
        FormatError::BadField { field, found: found.to_string(), expected: expected.to_string() }
    }

    pub(crate) fn value(
        tensor: &'static str,
        at: impl ToString,
        found: impl ToString,
        expected: impl ToString,
    ) -> Self {
        FormatError::BadValue { tensor, at: at.to_string(), found: found.to_string(), expected: expected.to_string() }
    }

    pub(crate) fn shape(tensor: &'static str, found: impl ToString, expected: impl ToString) -> Self {
        FormatError::WrongShape { tensor, found: found.to_string(), expected: expected.to_string() }
    }
}
