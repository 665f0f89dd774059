//! A problem with a configuration, and the key that has it.

use std::path::{Path, PathBuf};

/// An unusable configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}: {cause}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        cause: String,
    },
    /// Not TOML, an unknown key, or a value of another type.
    #[error("line {line}: {cause}")]
    Syntax {
        /// Line in the text, from 1.
        line: usize,
        /// The parser's message.
        cause: String,
    },
    /// An unusable value.
    #[error("{key}: {cause}")]
    Value {
        /// The key as a path, for example `models[0].backends[1].url`.
        key: String,
        /// The value found and the expected one.
        cause: String,
    },
    /// An unusable value from outside the file.
    #[error("{origin} ({key}): {cause}")]
    Override {
        /// Where the value comes from.
        origin: String,
        /// The key that it should replace.
        key: String,
        /// The expected value.
        cause: String,
    },
    /// Any of the above, in a file.
    #[error("{}: {cause}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// The problem in it.
        cause: Box<ConfigError>,
    },
}

/// The outcome of a check.
pub(super) type Result<T> = std::result::Result<T, ConfigError>;

impl ConfigError {
    pub(super) fn value(key: impl Into<String>, cause: impl ToString) -> Self {
        Self::Value { key: key.into(), cause: cause.to_string() }
    }

    pub(super) fn syntax(text: &str, error: &toml::de::Error) -> Self {
        let at = error.span().map_or(0, |span| span.start.min(text.len()));
        let line = text.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count() + 1;
        Self::Syntax { line, cause: error.message().lines().collect::<Vec<_>>().join(", ") }
    }

    pub(super) fn in_file(self, path: &Path) -> Self {
        Self::InFile { path: path.to_owned(), cause: Box::new(self) }
    }
}
