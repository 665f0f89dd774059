//! A configuration error, and the key that it concerns.

use std::path::{Path, PathBuf};

use semmoe_engines::SharedError;

/// An unusable configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: SharedError,
    },
    /// The text is not TOML, has an unknown key, or has a value of the wrong type.
    #[error("line {line}: {}", in_one_line(source))]
    Syntax {
        /// Line number in the text, starting at 1.
        line: usize,
        /// The parser's error. Its own message quotes the file's text.
        source: Box<toml::de::Error>,
    },
    /// An unusable value.
    #[error("{key}: {source}")]
    Value {
        /// The key as a path, for example `models[0].backends[1].url`.
        key: String,
        /// The value found and what was expected.
        source: SharedError,
    },
    /// An override from outside the file has an unusable value.
    #[error("{origin} ({key}): {source}")]
    Override {
        /// The override's origin.
        origin: String,
        /// The key that the override would replace.
        key: String,
        /// Why the value is unusable.
        source: SharedError,
    },
    /// Any of these errors, located in a file.
    #[error("{}: {source}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// The problem in it.
        source: Box<ConfigError>,
    },
}

/// The result of validating part of a configuration.
pub(super) type Result<T> = std::result::Result<T, ConfigError>;

impl ConfigError {
    pub(super) fn value(key: impl Into<String>, source: impl Into<SharedError>) -> Self {
        Self::Value { key: key.into(), source: source.into() }
    }

    pub(super) fn syntax(text: &str, error: toml::de::Error) -> Self {
        let at = error.span().map_or(0, |span| span.start.min(text.len()));
        let line = text.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count() + 1;
        Self::Syntax { line, source: Box::new(error) }
    }

    pub(super) fn in_file(self, path: &Path) -> Self {
        Self::InFile { path: path.to_owned(), source: Box::new(self) }
    }
}

/// Formats a parser's message in one line, without the text that it quotes.
pub(super) fn in_one_line(error: &toml::de::Error) -> String {
    error.message().lines().collect::<Vec<_>>().join(", ")
}
