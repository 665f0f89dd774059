//! The expert-related fields of a checkpoint's `config.json`, checked against the tables.

use std::path::Path;

use serde_json::{Map, Value};

use super::family::{FAMILIES, Family, known_architectures};
use super::source::CONFIG;
use super::{Permutation, PermuteError};
use crate::{CheckpointConfig, ConfigError, Tables};

/// The relevant part of the configuration.
#[derive(Debug)]
pub(super) struct Config {
    pub(super) family: &'static Family,
    /// The permutation derived from the tables.
    pub(super) permutation: Permutation,
    /// Number of layers in the main model; a checkpoint may contain more for speculative decoding.
    pub(super) hidden_layers: u16,
}

impl Config {
    /// Reads a checkpoint's `config.json` and checks that the architecture is known, that experts and layers match the
    /// tables, and that the permutation does not change gating.
    pub(super) fn read(checkpoint: &Path, tables: &Tables) -> Result<Self, PermuteError> {
        let (permutation, model) = (Permutation::of(tables)?, tables.model());
        let fields = CheckpointConfig::open(&checkpoint.join(CONFIG))?;
        let family = family(&fields)?;
        let expect = |key: &str, expected: u16, what: &str| {
            let is_expected = number(&fields, key)? == expected;
            fields.require(is_expected, key, || format!("{expected}, the tables' {what}"))
        };
        expect(family.experts_key, model.num_experts, "number of experts")?;
        expect("num_experts_per_tok", model.top_k, "top-k")?;
        let hidden_layers = number(&fields, "num_hidden_layers")?;
        if model.num_hidden_layers > 0 {
            expect("num_hidden_layers", model.num_hidden_layers, "number of layers")?;
        }
        let last = model.layer_ids.last().copied().unwrap_or(0);
        fields.require(last < hidden_layers, "num_hidden_layers", || {
            format!("more than {last}, the tables' last MoE layer")
        })?;
        check_gating_groups(&fields, &permutation)?;
        match expert_named_in(fields.document()) {
            None => Ok(Self { family, permutation, hidden_layers }),
            Some(name) => {
                let name: String = name.chars().take(100).collect();
                let expected = "no names of single experts, because these would keep their old numbers";
                Err(fields.bad("a string", format!("{name:?}"), expected).into())
            }
        }
    }
}

fn number(fields: &CheckpointConfig, key: &str) -> Result<u16, ConfigError> {
    fields.whole(key, 0..=u16::MAX.into())?.ok_or_else(|| fields.unexpected(key, "0 to 65535"))
}

/// Checks group-limited gating: the router picks some of `n_group` groups of consecutive experts, so the permutation
/// must keep each group together.
fn check_gating_groups(fields: &CheckpointConfig, permutation: &Permutation) -> Result<(), PermuteError> {
    let (n_group, experts) = (fields.whole("n_group", 0..=u16::MAX.into())?.unwrap_or(1), permutation.experts);
    if n_group <= 1 {
        return Ok(());
    }
    fields.require(experts.is_multiple_of(n_group), "n_group", || {
        format!("a number that divides the {experts} experts")
    })?;
    permutation.keeps_gating_groups(n_group)
}

fn family(fields: &CheckpointConfig) -> Result<&'static Family, PermuteError> {
    let names = fields.architectures();
    let known = FAMILIES.iter().find(|family| names.iter().any(|name| family.architectures.contains(name)));
    known.ok_or_else(|| {
        let (path, found) = (fields.path().to_owned(), fields.shown_architectures());
        PermuteError::Architecture { path, found, known: known_architectures() }
    })
}

/// Returns any string in a document that names a single expert, as lists of unquantised layers do.
fn expert_named_in(object: &Map<String, Value>) -> Option<&str> {
    fn in_value(value: &Value) -> Option<&str> {
        match value {
            Value::String(text) => names_one(text).then_some(text),
            Value::Array(items) => items.iter().find_map(in_value),
            Value::Object(object) => expert_named_in(object),
            _ => None,
        }
    }
    let key = object.keys().find(|key| names_one(key)).map(String::as_str);
    key.or_else(|| object.values().find_map(in_value))
}

fn names_one(text: &str) -> bool {
    text.split(".experts.").skip(1).any(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}
