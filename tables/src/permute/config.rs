//! The experts in a checkpoint's `config.json`, checked against the tables.

use std::path::Path;

use serde_json::Value;

use super::family::{FAMILIES, Family, known_architectures};
use super::source::CONFIG;
use super::{Permutation, PermuteError};
use crate::Tables;
use crate::container::Storage;

/// The largest published configurations have a few hundred kB.
const MAX_CONFIG_BYTES: usize = 16 << 20;

/// The part of the configuration that matters here.
#[derive(Debug)]
pub(super) struct Config {
    pub(super) family: &'static Family,
    /// That of the tables.
    pub(super) permutation: Permutation,
    /// Layers of the model proper; a checkpoint may hold more of them for speculation.
    pub(super) hidden_layers: u16,
    /// Groups of neighbouring experts that gating first chooses among; 1 when it does not.
    pub(super) n_group: u16,
    /// How many of them it searches.
    pub(super) top_groups: u16,
}

impl Config {
    /// Reads a checkpoint's `config.json` and checks it: a known architecture, the experts and layers of the tables,
    /// gating that the permutation does not change.
    pub(super) fn read(checkpoint: &Path, tables: &Tables) -> Result<Self, PermuteError> {
        let (permutation, model) = (Permutation::of(tables)?, tables.model());
        let path = &checkpoint.join(CONFIG);
        let value = read_json(path, MAX_CONFIG_BYTES)?;
        let family = family(&value, path)?;
        let fields = Fields { path, value: &value };
        let tables = |what: &str| format!("the tables' {what}");
        fields.expect(family.experts_key, model.num_experts, &tables("number of experts"))?;
        fields.expect("num_experts_per_tok", model.top_k, &tables("top-k"))?;
        let hidden_layers = fields.number("num_hidden_layers")?;
        if model.num_hidden_layers > 0 {
            fields.expect("num_hidden_layers", model.num_hidden_layers, &tables("number of layers"))?;
        }
        let last = model.layer_ids.last().copied().unwrap_or(0);
        if last >= hidden_layers {
            let expected = format!("more than {last}, the last MoE layer of the tables");
            return Err(PermuteError::field(path, "num_hidden_layers", hidden_layers, expected));
        }
        let n_group = fields.check_gating(&permutation)?;
        let top_groups = if n_group > 1 { fields.number("topk_group")? } else { 1 };
        match expert_named_in(&value) {
            None => Ok(Self { family, permutation, hidden_layers, n_group, top_groups }),
            Some(name) => {
                let name: String = name.chars().take(100).collect();
                let expected = "no names of single experts, which this file would still have under their old numbers";
                Err(PermuteError::field(path, "a string", format!("{name:?}"), expected))
            }
        }
    }
}

struct Fields<'a> {
    path: &'a Path,
    value: &'a Value,
}

impl Fields<'_> {
    fn number(&self, field: &str) -> Result<u16, PermuteError> {
        let found = self.value.get(field).unwrap_or(&Value::Null);
        found.as_u64().and_then(|n| u16::try_from(n).ok()).ok_or_else(|| {
            let found: String = found.to_string().chars().take(100).collect();
            PermuteError::field(self.path, field, found, "a number up to 65535")
        })
    }

    fn expect(&self, field: &str, expected: u16, what: &str) -> Result<(), PermuteError> {
        let found = self.number(field)?;
        if found == expected {
            return Ok(());
        }
        Err(PermuteError::field(self.path, field, found, format!("{expected}, {what}")))
    }

    /// Group-limited gating: `n_group` groups of neighbouring experts, of which `topk_group` are searched.
    /// Returns `n_group`.
    fn check_gating(&self, permutation: &Permutation) -> Result<u16, PermuteError> {
        if self.value.get("n_group").is_none_or(Value::is_null) {
            return Ok(1);
        }
        let (n_group, experts) = (self.number("n_group")?, permutation.experts);
        if n_group <= 1 {
            return Ok(1);
        }
        if !experts.is_multiple_of(n_group) {
            let expected = format!("a number that divides the {experts} experts");
            return Err(PermuteError::field(self.path, "n_group", n_group, expected));
        }
        permutation.keeps_gating_groups(n_group)?;
        Ok(n_group)
    }
}

fn family(value: &Value, path: &Path) -> Result<&'static Family, PermuteError> {
    let names = value.get("architectures").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let names: Vec<&str> = names.iter().filter_map(Value::as_str).collect();
    let known = FAMILIES.iter().find(|family| names.iter().any(|name| family.architectures.contains(name)));
    known.ok_or_else(|| {
        let found: String = names.join(", ").chars().take(200).collect();
        let found = if found.is_empty() { "(none)".to_owned() } else { found };
        PermuteError::Architecture { path: path.to_path_buf(), found, known: known_architectures() }
    })
}

/// A string anywhere in a document that names a single expert, as lists of layers that are not quantised do.
fn expert_named_in(value: &Value) -> Option<&str> {
    let names_one =
        |text: &str| text.split(".experts.").skip(1).any(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    match value {
        Value::String(text) => names_one(text).then_some(text),
        Value::Array(items) => items.iter().find_map(expert_named_in),
        Value::Object(fields) => {
            let key = fields.keys().find(|key| names_one(key)).map(String::as_str);
            key.or_else(|| fields.values().find_map(expert_named_in))
        }
        _ => None,
    }
}

/// A JSON file of a bounded size.
pub(super) fn read_json(path: &Path, max_bytes: usize) -> Result<Value, PermuteError> {
    let file = Storage::map(path)?;
    if file.len() > max_bytes {
        let found = format!("{} bytes long", file.len());
        return Err(PermuteError::field(path, "the file", found, format!("at most {max_bytes} bytes")));
    }
    serde_json::from_slice(&file).map_err(|source| PermuteError::Json { path: path.to_path_buf(), source })
}
