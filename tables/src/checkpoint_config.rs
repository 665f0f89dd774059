//! Reads the `config.json` of a Hugging Face checkpoint key by key. Planner, profiler, worker and `permute` all use
//! this reader, so that they see the same model.
//!
//! Multimodal models keep the language model's dimensions in a section. Quantisation, element type and tied embeddings
//! apply to the whole checkpoint and may appear inside the section, outside it, or both.

use std::fs::File;
use std::io::Read;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

/// Maximum size of the file; published configurations are at most a few hundred kB.
const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// Maximum number of characters of a value quoted in a message.
const MAX_SHOWN_CHARS: usize = 100;
/// Maximum nesting of sections.
const MAX_SECTIONS: usize = 2;
/// Sections that may contain the language model.
const SECTIONS: [&str; 4] = ["thinker_config", "text_config", "language_config", "llm_config"];
/// Keys that apply to the whole checkpoint: a value in the section takes precedence over one outside it.
const OF_CHECKPOINT: [&str; 4] = ["architectures", "dtype", "torch_dtype", "eos_token_id"];
/// Keys that determine the size and meaning of the weights: values inside and outside the section must agree.
const OF_WEIGHTS: [&str; 3] = ["quantization_config", "compression_config", "tie_word_embeddings"];

/// Reasons for rejecting a configuration or one of its keys.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The file is not a JSON object.
    #[error("{} is not valid JSON: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's error.
        source: serde_json::Error,
    },
    /// A value is missing, has the wrong type, is out of range, or is not supported.
    #[error("{}: {key} is {found}, expected {expected}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The key's value, shortened.
        found: String,
        /// The accepted values.
        expected: String,
    },
}

/// A configuration, or a section of one. Null values count as absent.
#[derive(Clone, Debug)]
pub struct CheckpointConfig {
    path: PathBuf,
    /// The language model's section first, then the objects that enclose it.
    objects: Vec<Map<String, Value>>,
}

impl CheckpointConfig {
    /// The largest dimension allowed: a product of three of them fits into a `u64`.
    pub const MAX_DIMENSION: u64 = 1 << 20;

    /// Reads a `config.json`, given its path or that of its directory.
    ///
    /// # Errors
    /// If the file cannot be read, is too large or is not a JSON object, or if a section contradicts what is outside
    /// it.
    pub fn open(path: &Path) -> Result<Self, ConfigError> {
        let path = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
        let failed = |source| ConfigError::Read { path: path.clone(), source };
        let mut bytes = Vec::new();
        // Limits the read with `take`, because a device has no length and a file may grow.
        File::open(&path).map_err(failed)?.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() as u64 > MAX_CONFIG_BYTES {
            return Err(failed(std::io::Error::other(format!("it has more than {MAX_CONFIG_BYTES} bytes"))));
        }
        Self::parse(&path, &bytes)
    }

    /// Parses the bytes of a `config.json`; `path` names the file in messages.
    ///
    /// # Errors
    /// See [`CheckpointConfig::open`].
    pub fn parse(path: &Path, json: &[u8]) -> Result<Self, ConfigError> {
        let invalid = |source| ConfigError::Json { path: path.to_owned(), source };
        let mut objects = vec![serde_json::from_slice::<Map<String, Value>>(json).map_err(invalid)?];
        while let Some(inner) = section_of(&objects[0]).filter(|_| objects.len() <= MAX_SECTIONS).cloned() {
            objects.insert(0, inner);
        }
        let config = Self { path: path.to_owned(), objects };
        OF_WEIGHTS.iter().try_for_each(|key| config.check_agreement(key)).map(|()| config)
    }

    fn check_agreement(&self, key: &str) -> Result<(), ConfigError> {
        let mut values = self.objects.iter().filter_map(|object| present(object, key));
        let first = values.next();
        match values.find(|value| Some(*value) != first) {
            Some(other) => {
                let expected = format!("{}, the value outside the language model's section", shown(Some(other)));
                Err(self.bad(key, shown(first), expected))
            }
            None => Ok(()),
        }
    }

    /// Returns the path of the file, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the whole document.
    pub fn document(&self) -> &Map<String, Value> {
        &self.objects[self.objects.len() - 1]
    }

    /// Returns the value of a key, if present.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let reach = if OF_CHECKPOINT.contains(&key) || OF_WEIGHTS.contains(&key) { self.objects.len() } else { 1 };
        self.objects[..reach].iter().find_map(|object| present(object, key))
    }

    /// Returns the names in `architectures`, those of the language model's section first.
    pub fn architectures(&self) -> Vec<&str> {
        let lists = self.objects.iter().filter_map(|object| object.get("architectures")?.as_array());
        lists.flatten().filter_map(Value::as_str).collect()
    }

    /// Returns the architecture names, shortened for a message.
    pub fn shown_architectures(&self) -> String {
        let found: String = self.architectures().join(", ").chars().take(MAX_SHOWN_CHARS).collect();
        if found.is_empty() { "(none)".to_owned() } else { found }
    }

    /// Returns the element type of the unquantised weights, and the key that specifies it.
    ///
    /// # Errors
    /// If the value is not a string.
    pub fn dtype(&self) -> Result<Option<(&'static str, &str)>, ConfigError> {
        let named = |object: &Map<String, Value>| {
            ["dtype", "torch_dtype"].into_iter().find(|key| present(object, key).is_some())
        };
        let Some(key) = self.objects.iter().find_map(named) else { return Ok(None) };
        Ok(self.text(key)?.map(|name| (key, name)))
    }

    /// Returns the object under a key as a configuration.
    ///
    /// # Errors
    /// If the value is not an object.
    pub fn section(&self, key: &str) -> Result<Option<Self>, ConfigError> {
        let object = self.optional(key, "an object or null", Value::as_object)?;
        Ok(object.map(|object| Self { path: self.path.clone(), objects: vec![object.clone()] }))
    }

    /// Returns a value converted by `read`, if present.
    ///
    /// # Errors
    /// If `read` rejects the value.
    pub fn optional<'a, T>(
        &'a self,
        key: &str,
        expected: impl Into<String>,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        self.get(key).map(|value| read(value).ok_or_else(|| self.unexpected(key, expected))).transpose()
    }

    /// Returns an integer within a range, if present.
    ///
    /// # Errors
    /// If the value is anything else or does not fit `T`.
    pub fn whole<T: TryFrom<u64>>(&self, key: &str, range: RangeInclusive<u64>) -> Result<Option<T>, ConfigError> {
        let expected = format!("{} to {}", range.start(), range.end());
        let within = |value: &Value| value.as_u64().filter(|number| range.contains(number))?.try_into().ok();
        self.optional(key, expected, within)
    }

    /// Returns an integer from 1 to `most`.
    ///
    /// # Errors
    /// If the value is missing or anything else.
    pub fn bounded<T: TryFrom<u64>>(&self, key: &str, most: u64) -> Result<T, ConfigError> {
        self.whole(key, 1..=most)?.ok_or_else(|| self.unexpected(key, format!("1 to {most}")))
    }

    /// Returns an integer from 1 to [`CheckpointConfig::MAX_DIMENSION`].
    ///
    /// # Errors
    /// See [`CheckpointConfig::bounded`].
    pub fn dimension<T: TryFrom<u64>>(&self, key: &str) -> Result<T, ConfigError> {
        self.bounded(key, Self::MAX_DIMENSION)
    }

    /// Returns an integer from 1 to [`CheckpointConfig::MAX_DIMENSION`], if present.
    ///
    /// # Errors
    /// If the value is anything else.
    pub fn optional_dimension<T: TryFrom<u64>>(&self, key: &str) -> Result<Option<T>, ConfigError> {
        self.whole(key, 1..=Self::MAX_DIMENSION)
    }

    /// Returns an integer from 0 to [`CheckpointConfig::MAX_DIMENSION`], or 0 if absent.
    ///
    /// # Errors
    /// If the value is anything else.
    pub fn count<T: TryFrom<u64> + Default>(&self, key: &str) -> Result<T, ConfigError> {
        Ok(self.whole(key, 0..=Self::MAX_DIMENSION)?.unwrap_or_default())
    }

    /// Returns a finite number, if present.
    ///
    /// # Errors
    /// If the value is anything else.
    pub fn real(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        self.optional(key, "a number", |value| value.as_f64().filter(|number| number.is_finite()))
    }

    /// Returns a positive number, if present.
    ///
    /// # Errors
    /// If the value is anything else.
    pub fn positive(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        let number = self.real(key)?;
        self.require(number.is_none_or(|number| number > 0.0), key, || "a number above 0".to_owned())?;
        Ok(number)
    }

    /// Returns a boolean, or `absent` if the key is missing.
    ///
    /// # Errors
    /// If the value is anything else.
    pub fn flag(&self, key: &str, absent: bool) -> Result<bool, ConfigError> {
        Ok(self.optional(key, "true or false", Value::as_bool)?.unwrap_or(absent))
    }

    /// Returns a list of integers, which is empty if the key is absent.
    ///
    /// # Errors
    /// If the value is anything else.
    pub fn numbers(&self, key: &str) -> Result<Vec<u64>, ConfigError> {
        let read = |value: &Value| -> Option<Vec<u64>> { value.as_array()?.iter().map(Value::as_u64).collect() };
        Ok(self.optional(key, "a list of whole numbers", read)?.unwrap_or_default())
    }

    /// Returns a string, if present.
    ///
    /// # Errors
    /// If the value is anything else.
    pub fn text(&self, key: &str) -> Result<Option<&str>, ConfigError> {
        self.optional(key, "a string", Value::as_str)
    }

    /// Rejects a value unless a condition on it holds.
    ///
    /// # Errors
    /// If the condition does not hold.
    pub fn require(&self, holds: bool, key: &str, expected: impl FnOnce() -> String) -> Result<(), ConfigError> {
        if holds { Ok(()) } else { Err(self.unexpected(key, expected())) }
    }

    /// Returns the indices of the MoE layers among `layers`, ascending: all except those that the model family's keys
    /// declare dense.
    ///
    /// # Errors
    /// If such a key is invalid, or no layer has experts.
    pub fn moe_layers(&self, layers: u16) -> Result<Vec<u16>, ConfigError> {
        // Some families have a list with one entry per layer: 1 = has experts.
        let listed = self.get("moe_layer_freq").is_some_and(Value::is_array);
        let sparse: Vec<u64> = if listed { self.numbers("moe_layer_freq")? } else { Vec::new() };
        // DeepSeek: layers divisible by f, from the k-th on, have experts. Qwen: every s-th layer, counted from 1, has
        // experts, with listed exceptions.
        let frequency = if listed { 1 } else { self.optional_dimension("moe_layer_freq")?.unwrap_or(1) };
        let first: u64 = self.count("first_k_dense_replace")?;
        let step = self.optional_dimension("decoder_sparse_step")?.unwrap_or(1);
        let dense = self.numbers("mlp_only_layers")?;
        let has_experts = |layer: &u16| {
            let layer = u64::from(*layer);
            let by_list = !listed || sparse.get(layer as usize) == Some(&1);
            let by_step = layer >= first && layer.is_multiple_of(frequency) && (layer + 1).is_multiple_of(step);
            by_list && by_step && !dense.contains(&layer)
        };
        let found: Vec<u16> = (0..layers).filter(has_experts).collect();
        let keys = ["moe_layer_freq", "first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers"];
        let key = keys.into_iter().rfind(|key| self.get(key).is_some()).unwrap_or("num_hidden_layers");
        self.require(!found.is_empty(), key, || "at least one MoE layer".to_owned()).map(|()| found)
    }

    /// Builds an error about a key: the value found and the values expected.
    pub fn unexpected(&self, key: &str, expected: impl Into<String>) -> ConfigError {
        let value = self.get(key).or_else(|| self.objects[0].get(key));
        self.bad(key, shown(value), expected)
    }

    /// Builds an error about a key, with `found` as the description of its value.
    pub fn bad(&self, key: &str, found: impl ToString, expected: impl Into<String>) -> ConfigError {
        let found = found.to_string().chars().take(MAX_SHOWN_CHARS).collect();
        ConfigError::Key { path: self.path.clone(), key: key.to_owned(), found, expected: expected.into() }
    }
}

/// Returns the section that contains the language model, directly or in a nested section.
fn section_of(object: &Map<String, Value>) -> Option<&Map<String, Value>> {
    let sections = SECTIONS.iter().filter_map(|name| object.get(*name)?.as_object());
    let mut sections = sections.filter(|inner| inner.contains_key("num_hidden_layers") || section_of(inner).is_some());
    sections.next()
}

fn present<'a>(object: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    object.get(key).filter(|value| !value.is_null())
}

fn shown(value: Option<&Value>) -> String {
    value.map_or_else(|| "missing".to_owned(), |value| value.to_string().chars().take(MAX_SHOWN_CHARS).collect())
}
