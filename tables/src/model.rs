//! The model that a file belongs to, and the origin of its data.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;

use serde::de::value::BorrowedStrDeserializer;
use serde::{Deserialize, Serialize};

use crate::FormatError;

/// Maximum number of rows, L x (V + 1), of a model: several times the need of any published model, and a limit on the
/// memory that a small hostile file can make a builder allocate (1 GiB of offsets).
pub const MAX_LAYER_ROWS: u64 = 1 << 27;

/// Maximum length of a text field. Longer text is damaged or malicious, and would be repeated in every message.
const MAX_TEXT_BYTES: usize = 4096;

/// The fields shared by all files about a model.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelInfo {
    /// The model's name, as used by the engine and the operator.
    pub model: String,
    /// SHA-256 (lower-case hex) over the canonical vocabulary, merges and added tokens; `None` = unknown.
    pub tokenizer_sha256: Option<String>,
    /// N: routed experts per MoE layer.
    pub num_experts: u16,
    /// k: experts activated per token and MoE layer.
    pub top_k: u16,
    /// V: vocabulary size; all token ids are below it.
    pub vocab_size: u32,
    /// Number of layers, including dense ones; 0 = unknown (some published files do not state it).
    pub num_hidden_layers: u16,
    /// The model's layer number of each MoE layer, strictly ascending; its length is L.
    pub layer_ids: Vec<u16>,
}

/// The origin of data. The creation time is an argument, because no part of this crate reads the clock.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// Free text.
    pub source: String,
    /// RFC 3339.
    pub created: String,
}

impl ModelInfo {
    /// L: the number of MoE layers.
    pub fn layers(&self) -> usize {
        self.layer_ids.len()
    }

    /// Returns L and k, as in the shape `[n, L, k]` of routes.
    pub fn route_shape(&self) -> [usize; 2] {
        [self.layers(), usize::from(self.top_k)]
    }

    /// Checks that the numbers are plausible: 1 <= k <= N < 65535, 1 <= V, at least one layer, layer ids strictly
    /// ascending and below the number of layers, L x (V + 1) <= [`MAX_LAYER_ROWS`].
    ///
    /// # Errors
    /// Names the first invalid field.
    pub fn validate(&self) -> Result<(), FormatError> {
        check_text("model", &self.model)?;
        if self.model.is_empty() {
            return Err(FormatError::field("model", "empty", "a name"));
        }
        if let Some(hash) = &self.tokenizer_sha256 {
            let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
            if hash.len() != 64 || !hash.bytes().all(hex) {
                let found: String = hash.chars().take(80).collect();
                let expected = "empty, or 64 lower-case hexadecimal digits";
                return Err(FormatError::field("tokenizer_sha256", format!("{found:?}"), expected));
            }
        }
        if self.num_experts == 0 || self.num_experts == u16::MAX {
            return Err(FormatError::field("num_experts", self.num_experts, "1 to 65534"));
        }
        if self.top_k == 0 || self.top_k > self.num_experts {
            return Err(FormatError::field("top_k", self.top_k, format!("1 to {}", self.num_experts)));
        }
        if self.vocab_size == 0 {
            return Err(FormatError::field("vocab_size", 0, "at least 1"));
        }
        self.validate_layers()?;
        let rows = self.layers() as u64 * (u64::from(self.vocab_size) + 1);
        if rows > MAX_LAYER_ROWS {
            let expected = format!("layers x (vocab_size + 1) at most {MAX_LAYER_ROWS}, not {rows}");
            return Err(FormatError::field("vocab_size", self.vocab_size, expected));
        }
        Ok(())
    }

    fn validate_layers(&self) -> Result<(), FormatError> {
        let Some(last) = self.layer_ids.last() else {
            return Err(FormatError::field("layer_ids", "empty", "at least one layer"));
        };
        if let Some(pair) = self.layer_ids.windows(2).find(|p| p[0] >= p[1]) {
            let found = format!("{} after {}", pair[1], pair[0]);
            return Err(FormatError::field("layer_ids", found, "strictly ascending ids"));
        }
        if self.num_hidden_layers > 0 && *last >= self.num_hidden_layers {
            let expected = format!("below num_hidden_layers ({})", self.num_hidden_layers);
            return Err(FormatError::field("layer_ids", last, expected));
        }
        Ok(())
    }

    /// Checks that two files belong to the same model. Compares every field, including the name; an unknown tokenizer
    /// hash or number of layers matches any.
    ///
    /// # Errors
    /// [`FormatError::ModelMismatch`] names the first field that differs.
    pub fn check_compatible(&self, other: &ModelInfo) -> Result<(), FormatError> {
        same("model", &self.model, &other.model)?;
        if let (Some(a), Some(b)) = (&self.tokenizer_sha256, &other.tokenizer_sha256) {
            same("tokenizer_sha256", a, b)?;
        }
        same("num_experts", &self.num_experts, &other.num_experts)?;
        same("top_k", &self.top_k, &other.top_k)?;
        same("vocab_size", &self.vocab_size, &other.vocab_size)?;
        if self.num_hidden_layers > 0 && other.num_hidden_layers > 0 {
            same("num_hidden_layers", &self.num_hidden_layers, &other.num_hidden_layers)?;
        }
        same("layer_ids", &self.layer_ids, &other.layer_ids)
    }

    /// Fills in unknown fields from another, compatible model, so that contradictory files are rejected regardless of
    /// their order.
    ///
    /// # Errors
    /// See [`ModelInfo::check_compatible`].
    pub fn adopt(&mut self, other: &ModelInfo) -> Result<(), FormatError> {
        other.check_compatible(self)?;
        if self.tokenizer_sha256.is_none() {
            self.tokenizer_sha256.clone_from(&other.tokenizer_sha256);
        }
        self.num_hidden_layers = self.num_hidden_layers.max(other.num_hidden_layers);
        Ok(())
    }

    pub(crate) fn from_metadata(metadata: &Metadata) -> Result<Self, FormatError> {
        let hash = text(metadata, "tokenizer_sha256")?;
        let info = ModelInfo {
            model: text(metadata, "model")?.to_owned(),
            tokenizer_sha256: (!hash.is_empty()).then(|| hash.to_owned()),
            num_experts: number(metadata, "num_experts")?,
            top_k: number(metadata, "top_k")?,
            vocab_size: number(metadata, "vocab_size")?,
            num_hidden_layers: match metadata.contains_key("num_hidden_layers") {
                true => number(metadata, "num_hidden_layers")?,
                false => 0,
            },
            layer_ids: json_list(metadata, "layer_ids")?,
        };
        info.validate()?;
        Ok(info)
    }

    pub(crate) fn to_metadata(&self, metadata: &mut Metadata) {
        let mut put = |key: &str, value: String| metadata.insert(key.to_owned(), value);
        put("model", self.model.clone());
        put("tokenizer_sha256", self.tokenizer_sha256.clone().unwrap_or_default());
        put("num_experts", self.num_experts.to_string());
        put("top_k", self.top_k.to_string());
        put("vocab_size", self.vocab_size.to_string());
        put("layer_ids", list_to_json(&self.layer_ids));
        if self.num_hidden_layers > 0 {
            put("num_hidden_layers", self.num_hidden_layers.to_string());
        }
    }
}

impl Provenance {
    pub(crate) fn validate(&self) -> Result<(), FormatError> {
        check_text("source", &self.source)?;
        check_text("created", &self.created)
    }

    pub(crate) fn from_metadata(metadata: &Metadata) -> Result<Self, FormatError> {
        let provenance =
            Provenance { source: text(metadata, "source")?.to_owned(), created: text(metadata, "created")?.to_owned() };
        provenance.validate()?;
        Ok(provenance)
    }

    pub(crate) fn to_metadata(&self, metadata: &mut Metadata) {
        metadata.insert("source".into(), self.source.clone());
        metadata.insert("created".into(), self.created.clone());
    }
}

/// The string metadata of a file, sorted by key.
pub(crate) type Metadata = BTreeMap<String, String>;

/// Returns a required metadata field.
pub(crate) fn text<'a>(metadata: &'a Metadata, field: &'static str) -> Result<&'a str, FormatError> {
    let value = metadata.get(field).ok_or(FormatError::MissingField(field))?;
    Ok(value)
}

/// Returns a required metadata field that is a decimal number.
pub(crate) fn number<T: FromStr>(metadata: &Metadata, field: &'static str) -> Result<T, FormatError> {
    let value = text(metadata, field)?;
    let canonical = value.bytes().all(|b| b.is_ascii_digit());
    value.parse().ok().filter(|_| canonical).ok_or_else(|| {
        let max = if size_of::<T>() == 2 { u64::from(u16::MAX) } else { u64::from(u32::MAX) };
        FormatError::field(field, quoted(value), format!("a decimal number up to {max}"))
    })
}

/// Returns the enum variant that serializes as this text.
pub(crate) fn by_name<'a, T: Deserialize<'a>>(text: &'a str) -> Option<T> {
    T::deserialize(BorrowedStrDeserializer::<serde::de::value::Error>::new(text)).ok()
}

/// Returns a required metadata field that is a JSON list of small numbers.
pub(crate) fn json_list(metadata: &Metadata, field: &'static str) -> Result<Vec<u16>, FormatError> {
    let value = text(metadata, field)?;
    serde_json::from_str(value)
        .map_err(|_| FormatError::field(field, quoted(value), "a JSON list of numbers up to 65535"))
}

pub(crate) fn list_to_json<T: Display>(list: &[T]) -> String {
    let items: Vec<String> = list.iter().map(T::to_string).collect();
    format!("[{}]", items.join(","))
}

pub(crate) fn check_text(field: &'static str, value: &str) -> Result<(), FormatError> {
    if value.len() > MAX_TEXT_BYTES {
        let found = format!("{} bytes long", value.len());
        return Err(FormatError::field(field, found, format!("at most {MAX_TEXT_BYTES} bytes")));
    }
    Ok(())
}

/// Shortens text from a damaged file for a message.
pub(crate) fn short(text: &str) -> String {
    text.chars().take(60).collect()
}

/// Shortens and quotes text from a damaged file for a message.
pub(crate) fn quoted(text: &str) -> String {
    let start = short(text);
    if start.len() < text.len() { format!("{start:?}...") } else { format!("{start:?}") }
}

fn same<T: PartialEq + std::fmt::Debug>(field: &'static str, a: &T, b: &T) -> Result<(), FormatError> {
    if a == b {
        return Ok(());
    }
    Err(FormatError::ModelMismatch { field, found: format!("{a:?}"), expected: format!("{b:?}") })
}
