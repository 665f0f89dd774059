//! The keys of `config.json`, read one by one: an error names the key, what was found and what was
//! expected.

use std::path::Path;

use serde_json::{Map, Value};

use crate::model::ModelError;

/// Bounds every dimension, so that products of a few of them cannot overflow.
const MAX_DIMENSION: u64 = 1 << 24;
/// Of a value that is shown in a message.
const MAX_SHOWN_CHARS: usize = 200;

/// A JSON object and the name of its file; `prefix` is what stands before its keys in messages.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    pub(super) path: &'a Path,
    pub(super) object: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// A value that is there and not null.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// A whole number from 1 to 2^24.
    pub(super) fn dimension(&self, key: &'static str) -> Result<usize, ModelError> {
        self.bounded(key, MAX_DIMENSION)
    }

    /// As [`Fields::dimension`], or another one where there is none.
    pub(super) fn dimension_or(&self, key: &'static str, other: usize) -> Result<usize, ModelError> {
        if self.get(key).is_some() { self.dimension(key) } else { Ok(other) }
    }

    /// A whole number from 1 to `most`.
    pub(super) fn bounded(&self, key: &'static str, most: u64) -> Result<usize, ModelError> {
        match self.get(key).and_then(Value::as_u64).filter(|value| (1..=most).contains(value)) {
            Some(value) => Ok(value as usize),
            None => Err(self.unexpected(key, format!("1 to {most}"))),
        }
    }

    /// A whole number from 0 to 2^24, 0 where there is none.
    pub(super) fn count(&self, key: &'static str) -> Result<usize, ModelError> {
        match self.get(key) {
            None => Ok(0),
            Some(value) => match value.as_u64().filter(|value| *value <= MAX_DIMENSION) {
                Some(value) => Ok(value as usize),
                None => Err(self.unexpected(key, format!("0 to {MAX_DIMENSION}"))),
            },
        }
    }

    /// A finite number, if there is one.
    pub(super) fn real(&self, key: &'static str) -> Result<Option<f64>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match value.as_f64().filter(|value| value.is_finite()) {
                Some(value) => Ok(Some(value)),
                None => Err(self.unexpected(key, "a number")),
            },
        }
    }

    /// A number above 0, if there is one.
    pub(super) fn positive(&self, key: &'static str) -> Result<Option<f64>, ModelError> {
        match self.real(key)? {
            Some(value) if value <= 0.0 => Err(self.unexpected(key, "a number above 0")),
            value => Ok(value),
        }
    }

    /// True or false, or what holds where there is nothing.
    pub(super) fn flag(&self, key: &'static str, absent: bool) -> Result<bool, ModelError> {
        match self.get(key) {
            None => Ok(absent),
            Some(value) => value.as_bool().ok_or_else(|| self.unexpected(key, "true or false")),
        }
    }

    /// A list of whole numbers, empty where there is none.
    pub(super) fn numbers(&self, key: &'static str) -> Result<Vec<u64>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let numbers = value.as_array().and_then(|list| list.iter().map(Value::as_u64).collect());
        numbers.ok_or_else(|| self.unexpected(key, "a list of whole numbers"))
    }

    /// A text, if there is one.
    pub(super) fn text(&self, key: &'static str) -> Result<Option<&'a str>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => value.as_str().map(Some).ok_or_else(|| self.unexpected(key, "a text")),
        }
    }

    /// Refuses what is there and is not this text.
    pub(super) fn only(&self, key: &'static str, expected: &str) -> Result<(), ModelError> {
        match self.text(key)? {
            Some(text) if text != expected => Err(self.unexpected(key, format!("{expected:?}"))),
            _ => Ok(()),
        }
    }

    /// Refuses what is there and is not this number or flag.
    pub(super) fn only_value(&self, key: &'static str, expected: &Value) -> Result<(), ModelError> {
        let same = |value: &Value| value == expected || (value.is_number() && value.as_f64() == expected.as_f64());
        match self.get(key) {
            Some(value) if !same(value) => Err(self.unexpected(key, expected.to_string())),
            _ => Ok(()),
        }
    }

    /// The error about a key: what is found there, and what was expected.
    pub(super) fn unexpected(&self, key: &'static str, expected: impl Into<String>) -> ModelError {
        let found = match self.object.get(key) {
            None => "missing".to_owned(),
            Some(value) => value.to_string().chars().take(MAX_SHOWN_CHARS).collect(),
        };
        self.bad(key, found, expected)
    }

    /// As [`Fields::unexpected`], of a value that was not read as it stands.
    pub(super) fn bad(&self, key: &'static str, found: impl ToString, expected: impl Into<String>) -> ModelError {
        ModelError::Config {
            path: self.path.to_path_buf(),
            field: key,
            found: found.to_string(),
            expected: expected.into(),
        }
    }
}
