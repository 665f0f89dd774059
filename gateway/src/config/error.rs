//! A problem with a configuration, and the key that has it.

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
    /// Not TOML, an unknown key, or a value of another type.
    #[error("line {line}: {}", in_one_line(source))]
    Syntax {
        /// Line in the text, from 1.
        line: usize,
        /// The parser's error, whose own text repeats the file's.
        source: Box<toml::de::Error>,
    },
    /// An unusable value.
    #[error("{key}: {source}")]
    Value {
        /// The key as a path, for example `models[0].backends[1].url`.
        key: String,
        /// The value found and the expected one.
        source: SharedError,
    },
    /// An unusable value from outside the file.
    #[error("{origin} ({key}): {source}")]
    Override {
        /// Where the value comes from.
        origin: String,
        /// The key that it should replace.
        key: String,
        /// The expected value.
        source: SharedError,
    },
    /// Any of the above, in a file.
    #[error("{}: {source}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// The problem in it.
        source: Box<ConfigError>,
    },
}

/// The outcome of a check.
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

/// A parser's message in one line, without the text that it quotes.
pub(super) fn in_one_line(error: &toml::de::Error) -> String {
    error.message().lines().collect::<Vec<_>>().join(", ")
}
