//! Typed access to the keys in a TOML file; errors name the key, the value found and the values expected.
//!
//! TOML has no null, so a null in the tree stands for NaN or infinity, never for an absent value.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::PlanError;
use crate::error::SyntaxError;

/// Limit on every dimension, so that a product of three dimensions fits in a `u64`.
pub(crate) const MAX_DIMENSION: u64 = 1 << 20;
/// Limit on all other numbers: bandwidths in TB/s, rates, seconds.
const MAX_NUMBER: f64 = 1e12;
/// Maximum length of a value in a message.
const MAX_SHOWN_CHARS: usize = 80;

/// Parses JSON; `format` describes the expected content.
pub(crate) fn json<T: DeserializeOwned>(file: &str, format: &'static str, text: &str) -> Result<T, PlanError> {
    parsed(file, format, serde_json::from_str(text))
}

/// Reads a TOML document that may only contain these keys.
pub(crate) fn toml<R>(
    file: &str,
    text: &str,
    known: &[&str],
    read: impl FnOnce(&Fields<'_>) -> Result<R, PlanError>,
) -> Result<R, PlanError> {
    let object = parsed(file, "TOML", toml::from_str(text).map_err(Box::new))?;
    read(&Fields { file, prefix: String::new(), object: &object }.known(known)?)
}

fn parsed<T, E: Into<SyntaxError>>(file: &str, format: &'static str, result: Result<T, E>) -> Result<T, PlanError> {
    result.map_err(|cause| PlanError::Syntax { file: file.to_owned(), format, cause: cause.into() })
}

/// An object in a file; `prefix` precedes its keys in messages.
#[derive(Clone, Debug)]
pub(crate) struct Fields<'a> {
    file: &'a str,
    prefix: String,
    object: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// Returns this object if it has no other keys.
    pub(crate) fn known(self, known: &[&str]) -> Result<Self, PlanError> {
        match self.object.keys().find(|key| !known.contains(&key.as_str())) {
            Some(key) => Err(self.bad(key, "an unknown key", format!("one of {}", known.join(", ")))),
            None => Ok(self),
        }
    }

    /// Returns a nested object, if present; callers check its keys with [`Fields::known`] if necessary.
    pub(crate) fn inner(&self, key: &str) -> Option<Self> {
        match self.get(key) {
            Some(Value::Object(object)) => Some(self.inside(key.to_owned(), object)),
            _ => None,
        }
    }

    /// Reads a list of objects that may only contain these keys, using `read` for each; empty if absent.
    pub(crate) fn list<R>(
        &self,
        key: &str,
        known: &[&str],
        read: impl Fn(&Self) -> Result<R, PlanError>,
    ) -> Result<Vec<R>, PlanError> {
        self.any_sections(key)?.into_iter().map(|section| read(&section.known(known)?)).collect()
    }

    /// Returns a list of objects whose keys the caller checks with [`Fields::known`]; empty if absent.
    pub(crate) fn any_sections(&self, key: &str) -> Result<Vec<Self>, PlanError> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let list = value.as_array().ok_or_else(|| self.unexpected(key, "a list of tables"))?;
        let section = |(at, value): (usize, &'a Value)| {
            let name = format!("{key}[{at}]");
            match value {
                Value::Object(object) => Ok(self.inside(name, object)),
                _ => Err(self.bad(&name, shown(Some(value)), "a table")),
            }
        };
        list.iter().enumerate().map(section).collect()
    }

    fn inside(&self, key: String, object: &'a Map<String, Value>) -> Self {
        Self { file: self.file, prefix: format!("{}{key}.", self.prefix), object }
    }

    /// A value, if present.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key)
    }

    /// Reads an integer from 1 to 2^20.
    pub(crate) fn dimension(&self, key: &str) -> Result<u64, PlanError> {
        match self.get(key).and_then(Value::as_u64).filter(|value| (1..=MAX_DIMENSION).contains(value)) {
            Some(value) => Ok(value),
            None => Err(self.unexpected(key, format!("an integer from 1 to {MAX_DIMENSION}"))),
        }
    }

    /// Reads a number above 0 and at most 10^12.
    pub(crate) fn positive(&self, key: &str) -> Result<f64, PlanError> {
        let number = self.not_negative(key).ok().filter(|value| *value > 0.0);
        number.ok_or_else(|| self.unexpected(key, "a number above 0, at most 1e12"))
    }

    /// Reads a number above 0 and at most 10^12, if present.
    pub(crate) fn positive_if(&self, key: &str) -> Result<Option<f64>, PlanError> {
        self.get(key).map(|_| self.positive(key)).transpose()
    }

    /// Reads a number from 0 to 10^12.
    pub(crate) fn not_negative(&self, key: &str) -> Result<f64, PlanError> {
        let number = self.get(key).and_then(Value::as_f64).filter(|value| (0.0..=MAX_NUMBER).contains(value));
        number.ok_or_else(|| self.unexpected(key, "a number from 0 to 1e12"))
    }

    /// Reads a boolean; returns `absent` if the key is missing.
    pub(crate) fn flag(&self, key: &str, absent: bool) -> Result<bool, PlanError> {
        match self.get(key) {
            None => Ok(absent),
            Some(value) => value.as_bool().ok_or_else(|| self.unexpected(key, "true or false")),
        }
    }

    /// Reads a required string and truncates it to 64 characters.
    pub(crate) fn name(&self, key: &str) -> Result<String, PlanError> {
        let name = self.text(key)?.ok_or_else(|| self.unexpected(key, "a text"))?;
        Ok(name.chars().take(64).collect())
    }

    /// Reads a string, if present.
    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, PlanError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => value.as_str().map(Some).ok_or_else(|| self.unexpected(key, "a text")),
        }
    }

    /// Creates the error for an unexpected value of a key in this object.
    pub(crate) fn unexpected(&self, key: &str, expected: impl Into<String>) -> PlanError {
        self.bad(key, shown(self.object.get(key)), expected)
    }

    fn bad(&self, key: &str, found: impl Into<String>, expected: impl Into<String>) -> PlanError {
        let key = format!("{}{key}", self.prefix).chars().take(MAX_SHOWN_CHARS).collect();
        PlanError::Key { file: self.file.to_owned(), key, found: found.into(), expected: expected.into() }
    }
}

fn shown(value: Option<&Value>) -> String {
    match value {
        None => "missing".to_owned(),
        Some(Value::Null) => "null, NaN or infinite".to_owned(),
        Some(value) => value.to_string().chars().take(MAX_SHOWN_CHARS).collect(),
    }
}
