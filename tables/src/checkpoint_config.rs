//! `config.json` of a Hugging Face checkpoint, read key by key: the one reader that planner, profiler, worker and
//! `permute` have, so that all of them see the same model.
//!
//! Models that see or hear have the language model's dimensions in a section of their own. Quantisation, element type
//! and tied embeddings, which are the whole checkpoint's, may then be inside, outside, or in both places.

use std::fs::File;
use std::io::Read;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

/// Published configurations have at most a few hundred kB.
const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// The most characters of a value in a message.
const MAX_SHOWN_CHARS: usize = 100;
/// Sections inside each other.
const MAX_SECTIONS: usize = 2;
/// Sections with the language model.
const SECTIONS: [&str; 4] = ["thinker_config", "text_config", "language_config", "llm_config"];
/// Keys about the whole checkpoint: the section's own counts before the one around it.
const OF_CHECKPOINT: [&str; 4] = ["architectures", "dtype", "torch_dtype", "eos_token_id"];
/// The same for keys that must not differ: they decide the size and the meaning of the weights.
const OF_WEIGHTS: [&str; 3] = ["quantization_config", "compression_config", "tie_word_embeddings"];

/// Why a configuration, or a key of it, is of no use.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}: {cause}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's message.
        cause: String,
    },
    /// The file is no JSON object.
    #[error("{} is not valid JSON: {cause}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's message.
        cause: String,
    },
    /// A value that is missing, of the wrong type, out of range, or not supported.
    #[error("{}: {key} is {found}, expected {expected}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value, shortened.
        found: String,
        /// The accepted values.
        expected: String,
    },
}

/// A configuration, or a section of one. A value of null counts as absent.
#[derive(Clone, Debug)]
pub struct CheckpointConfig {
    path: PathBuf,
    /// The language model's section first, then the objects around it.
    objects: Vec<Map<String, Value>>,
}

impl CheckpointConfig {
    /// The largest dimension: a product of three of them fits a `u64`.
    pub const MAX_DIMENSION: u64 = 1 << 20;

    /// Reads a `config.json`, or the one in a folder.
    ///
    /// # Errors
    /// A file that cannot be read, is too large, or is no JSON object; what differs inside and outside of a section.
    pub fn open(path: &Path) -> Result<Self, ConfigError> {
        let path = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
        let failed = |cause: std::io::Error| ConfigError::Read { path: path.clone(), cause: cause.to_string() };
        let mut bytes = Vec::new();
        // A device has no length, and a file may grow.
        File::open(&path).map_err(failed)?.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() as u64 > MAX_CONFIG_BYTES {
            let cause = format!("it has more than {MAX_CONFIG_BYTES} bytes");
            return Err(ConfigError::Read { path, cause });
        }
        Self::parse(&path, &bytes)
    }

    /// The same of bytes; `path` names the file in messages.
    ///
    /// # Errors
    /// As [`CheckpointConfig::open`].
    pub fn parse(path: &Path, json: &[u8]) -> Result<Self, ConfigError> {
        let invalid = |error: serde_json::Error| ConfigError::Json { path: path.to_owned(), cause: error.to_string() };
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
                let expected = format!("{}, as outside of the language model's section", shown(Some(other)));
                Err(self.bad(key, shown(first), expected))
            }
            None => Ok(()),
        }
    }

    /// The file, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The whole document.
    pub fn document(&self) -> &Map<String, Value> {
        &self.objects[self.objects.len() - 1]
    }

    /// A value that is there.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let reach = if OF_CHECKPOINT.contains(&key) || OF_WEIGHTS.contains(&key) { self.objects.len() } else { 1 };
        self.objects[..reach].iter().find_map(|object| present(object, key))
    }

    /// The names in `architectures`, those of the language model's section first.
    pub fn architectures(&self) -> Vec<&str> {
        let lists = self.objects.iter().filter_map(|object| object.get("architectures")?.as_array());
        lists.flatten().filter_map(Value::as_str).collect()
    }

    /// The names of the architectures in a message, shortened.
    pub fn shown_architectures(&self) -> String {
        let found: String = self.architectures().join(", ").chars().take(MAX_SHOWN_CHARS).collect();
        if found.is_empty() { "(none)".to_owned() } else { found }
    }

    /// The element type of the weights that are not quantised, and the key that names it.
    ///
    /// # Errors
    /// When it is not a text.
    pub fn dtype(&self) -> Result<Option<(&'static str, &str)>, ConfigError> {
        let named = |object: &Map<String, Value>| {
            ["dtype", "torch_dtype"].into_iter().find(|key| present(object, key).is_some())
        };
        let Some(key) = self.objects.iter().find_map(named) else { return Ok(None) };
        Ok(self.text(key)?.map(|name| (key, name)))
    }

    /// The object of a key, as a configuration of its own.
    ///
    /// # Errors
    /// When it is not an object.
    pub fn section(&self, key: &str) -> Result<Option<Self>, ConfigError> {
        let object = self.optional(key, "an object or null", Value::as_object)?;
        Ok(object.map(|object| Self { path: self.path.clone(), objects: vec![object.clone()] }))
    }

    /// A value as `read` understands it, if there is one.
    ///
    /// # Errors
    /// When `read` does not understand it.
    pub fn optional<'a, T>(
        &'a self,
        key: &str,
        expected: impl Into<String>,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        self.get(key).map(|value| read(value).ok_or_else(|| self.unexpected(key, expected))).transpose()
    }

    /// A whole number in a range, if there is one.
    ///
    /// # Errors
    /// When it is something else, or does not fit `T`.
    pub fn whole<T: TryFrom<u64>>(&self, key: &str, range: RangeInclusive<u64>) -> Result<Option<T>, ConfigError> {
        let expected = format!("{} to {}", range.start(), range.end());
        let within = |value: &Value| value.as_u64().filter(|number| range.contains(number))?.try_into().ok();
        self.optional(key, expected, within)
    }

    /// A whole number from 1 to `most`.
    ///
    /// # Errors
    /// When it is missing or something else.
    pub fn bounded<T: TryFrom<u64>>(&self, key: &str, most: u64) -> Result<T, ConfigError> {
        self.whole(key, 1..=most)?.ok_or_else(|| self.unexpected(key, format!("1 to {most}")))
    }

    /// A whole number from 1 to [`CheckpointConfig::MAX_DIMENSION`].
    ///
    /// # Errors
    /// As [`CheckpointConfig::bounded`].
    pub fn dimension<T: TryFrom<u64>>(&self, key: &str) -> Result<T, ConfigError> {
        self.bounded(key, Self::MAX_DIMENSION)
    }

    /// The same, if there is one.
    ///
    /// # Errors
    /// When it is something else.
    pub fn optional_dimension<T: TryFrom<u64>>(&self, key: &str) -> Result<Option<T>, ConfigError> {
        self.whole(key, 1..=Self::MAX_DIMENSION)
    }

    /// The same, 0 or more, and 0 where there is none.
    ///
    /// # Errors
    /// When it is something else.
    pub fn count<T: TryFrom<u64> + Default>(&self, key: &str) -> Result<T, ConfigError> {
        Ok(self.whole(key, 0..=Self::MAX_DIMENSION)?.unwrap_or_default())
    }

    /// A finite number, if there is one.
    ///
    /// # Errors
    /// When it is something else.
    pub fn real(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        self.optional(key, "a number", |value| value.as_f64().filter(|number| number.is_finite()))
    }

    /// A number above 0, if there is one.
    ///
    /// # Errors
    /// When it is something else.
    pub fn positive(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        let number = self.real(key)?;
        self.require(number.is_none_or(|number| number > 0.0), key, || "a number above 0".to_owned())?;
        Ok(number)
    }

    /// True or false, or the default where there is nothing.
    ///
    /// # Errors
    /// When it is something else.
    pub fn flag(&self, key: &str, absent: bool) -> Result<bool, ConfigError> {
        Ok(self.optional(key, "true or false", Value::as_bool)?.unwrap_or(absent))
    }

    /// A list of whole numbers, empty where there is none.
    ///
    /// # Errors
    /// When it is something else.
    pub fn numbers(&self, key: &str) -> Result<Vec<u64>, ConfigError> {
        let read = |value: &Value| -> Option<Vec<u64>> { value.as_array()?.iter().map(Value::as_u64).collect() };
        Ok(self.optional(key, "a list of whole numbers", read)?.unwrap_or_default())
    }

    /// A text, if there is one.
    ///
    /// # Errors
    /// When it is something else.
    pub fn text(&self, key: &str) -> Result<Option<&str>, ConfigError> {
        self.optional(key, "a text", Value::as_str)
    }

    /// Refuses a value unless a condition on it holds.
    ///
    /// # Errors
    /// When it does not hold.
    pub fn require(&self, holds: bool, key: &str, expected: impl FnOnce() -> String) -> Result<(), ConfigError> {
        if holds { Ok(()) } else { Err(self.unexpected(key, expected())) }
    }

    /// The numbers of the layers with experts among `layers`, ascending: all but those that a family's keys say are
    /// dense.
    ///
    /// # Errors
    /// When such a key is of no use, or no layer has experts.
    pub fn moe_layers(&self, layers: u16) -> Result<Vec<u16>, ConfigError> {
        // Some say it layer by layer: 1 has experts.
        let listed = self.get("moe_layer_freq").is_some_and(Value::is_array);
        let sparse: Vec<u64> = if listed { self.numbers("moe_layer_freq")? } else { Vec::new() };
        // DeepSeek: the first k are dense, and then every f-th is not. Qwen: every s-th is not, counted from 1, but for
        // some.
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

    /// The error about a key, with the value found and the value expected.
    pub fn unexpected(&self, key: &str, expected: impl Into<String>) -> ConfigError {
        let value = self.get(key).or_else(|| self.objects[0].get(key));
        self.bad(key, shown(value), expected)
    }

    /// The same for a value that was not read as it stands.
    pub fn bad(&self, key: &str, found: impl ToString, expected: impl Into<String>) -> ConfigError {
        let found = found.to_string().chars().take(MAX_SHOWN_CHARS).collect();
        ConfigError::Key { path: self.path.clone(), key: key.to_owned(), found, expected: expected.into() }
    }
}

/// The section with the language model, or with the section that has it.
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
