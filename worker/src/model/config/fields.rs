//! The keys of `config.json`, read one by one: an error names the key, the value found and the value expected.

use std::path::Path;

use serde_json::{Map, Value};

use crate::model::ModelError;

/// Bounds every dimension, so that products of a few of them cannot overflow.
const MAX_DIMENSION: u64 = 1 << 24;
/// The most characters of a value in a message.
const MAX_SHOWN_CHARS: usize = 200;

/// A JSON object and the name of its file.
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

    /// A value as `read` understands it, if there is one.
    pub(super) fn optional<T>(
        &self,
        key: &'static str,
        expected: impl Into<String>,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        self.get(key).map(|value| read(value).ok_or_else(|| self.unexpected(key, expected))).transpose()
    }

    /// A whole number in a range, if there is one.
    fn whole(&self, key: &'static str, least: u64, most: u64) -> Result<Option<usize>, ModelError> {
        let within = |value: &Value| value.as_u64().filter(|number| (least..=most).contains(number));
        Ok(self.optional(key, format!("{least} to {most}"), within)?.map(|number| number as usize))
    }

    /// A whole number from 1 to 2^24.
    pub(super) fn dimension(&self, key: &'static str) -> Result<usize, ModelError> {
        self.bounded(key, MAX_DIMENSION)
    }

    /// The same, if there is one.
    pub(super) fn optional_dimension(&self, key: &'static str) -> Result<Option<usize>, ModelError> {
        self.whole(key, 1, MAX_DIMENSION)
    }

    /// As [`Fields::dimension`], or another one where there is none.
    pub(super) fn dimension_or(&self, key: &'static str, other: usize) -> Result<usize, ModelError> {
        Ok(self.optional_dimension(key)?.unwrap_or(other))
    }

    /// A whole number from 1 to `most`.
    pub(super) fn bounded(&self, key: &'static str, most: u64) -> Result<usize, ModelError> {
        self.whole(key, 1, most)?.ok_or_else(|| self.unexpected(key, format!("1 to {most}")))
    }

    /// A whole number from 0 to 2^24, 0 where there is none.
    pub(super) fn count(&self, key: &'static str) -> Result<usize, ModelError> {
        Ok(self.whole(key, 0, MAX_DIMENSION)?.unwrap_or(0))
    }

    /// A finite number, if there is one.
    pub(super) fn real(&self, key: &'static str) -> Result<Option<f64>, ModelError> {
        self.optional(key, "a number", |value| value.as_f64().filter(|number| number.is_finite()))
    }

    /// A number above 0, if there is one.
    pub(super) fn positive(&self, key: &'static str) -> Result<Option<f64>, ModelError> {
        let number = self.real(key)?;
        self.require(number.is_none_or(|number| number > 0.0), key, || "a number above 0".to_owned())?;
        Ok(number)
    }

    /// True or false, or the default where there is nothing.
    pub(super) fn flag(&self, key: &'static str, absent: bool) -> Result<bool, ModelError> {
        Ok(self.optional(key, "true or false", Value::as_bool)?.unwrap_or(absent))
    }

    /// A list of whole numbers, empty where there is none.
    pub(super) fn numbers(&self, key: &'static str) -> Result<Vec<u64>, ModelError> {
        let read = |value: &Value| -> Option<Vec<u64>> { value.as_array()?.iter().map(Value::as_u64).collect() };
        Ok(self.optional(key, "a list of whole numbers", read)?.unwrap_or_default())
    }

    /// A text, if there is one.
    pub(super) fn text(&self, key: &'static str) -> Result<Option<&'a str>, ModelError> {
        self.optional(key, "a text", Value::as_str)
    }

    /// Refuses a value unless a condition on it holds.
    pub(super) fn require(
        &self,
        holds: bool,
        key: &'static str,
        expected: impl FnOnce() -> String,
    ) -> Result<(), ModelError> {
        if holds { Ok(()) } else { Err(self.unexpected(key, expected())) }
    }

    /// Refuses any other text.
    pub(super) fn only(&self, key: &'static str, expected: &str) -> Result<(), ModelError> {
        let is_other = self.text(key)?.is_some_and(|text| text != expected);
        self.require(!is_other, key, || format!("{expected:?}"))
    }

    /// Refuses any other number or flag.
    pub(super) fn only_value(&self, key: &'static str, expected: &Value) -> Result<(), ModelError> {
        let same = |value: &Value| value == expected || (value.is_number() && value.as_f64() == expected.as_f64());
        self.require(self.get(key).is_none_or(same), key, || expected.to_string())
    }

    /// The error about a key, with the value found and the value expected.
    pub(super) fn unexpected(&self, key: &'static str, expected: impl Into<String>) -> ModelError {
        self.bad(key, self.object.get(key).map_or_else(|| "missing".to_owned(), Value::to_string), expected)
    }

    /// As [`Fields::unexpected`], for a value that was not read as it stands.
    pub(super) fn bad(&self, key: &'static str, found: impl ToString, expected: impl Into<String>) -> ModelError {
        ModelError::Config {
            path: self.path.to_path_buf(),
            field: key,
            found: found.to_string().chars().take(MAX_SHOWN_CHARS).collect(),
            expected: expected.into(),
        }
    }
}
