//! The documented request fields against the table that the gateway uses.

use std::collections::{BTreeMap, BTreeSet};

use semmoe_engines::fields::{FIELDS, Treatment};
use semmoe_engines::json::ids::Form;

/// The document's word for a treatment.
fn word(treatment: Treatment) -> &'static str {
    match treatment {
        Treatment::Removed => "removed",
        Treatment::Refused => "refused",
        Treatment::Adapters => "adapters",
        Treatment::Ids(Form::Ids) => "ids",
        Treatment::Ids(Form::IdsOrPrompt) => "ids or prompt",
        Treatment::Ids(Form::IdsOrText) => "ids or text",
        Treatment::Arguments => "arguments",
    }
}

#[test]
fn the_operators_page_has_each_treatment_with_its_fields() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/api.md")).unwrap();
    let treatments: BTreeSet<&str> = FIELDS.iter().map(|field| word(field.treatment)).collect();
    for treatment in treatments {
        let row = page.lines().find(|line| line.starts_with(&format!("| {treatment} |"))).expect(treatment);
        let cell = row.trim_end_matches(" |").rsplit(" | ").next().unwrap();
        let named: BTreeSet<&str> = cell.split('`').skip(1).step_by(2).collect();
        let fields = FIELDS.iter().filter(|field| word(field.treatment) == treatment).map(|field| field.name);
        assert_eq!(named, fields.collect(), "{treatment}");
    }
}

#[test]
fn the_page_says_what_happens_to_each_field() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/FIELDS.md")).unwrap();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    let said: BTreeMap<&str, &str> =
        rows.map(|(name, cells)| (name, cells.trim_end_matches('|').rsplit('|').next().unwrap().trim())).collect();
    assert!(said.len() > 200, "{} fields", said.len());
    for field in &FIELDS {
        assert_eq!(said.get(field.name), Some(&word(field.treatment)), "{}", field.name);
    }
    for (name, word) in said {
        let is_special = FIELDS.iter().any(|field| field.name == name);
        assert!(is_special || ["passed", "read"].contains(&word), "{name} is called '{word}'");
    }
}
