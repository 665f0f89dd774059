//! The dependency policy of deny.toml, enforced from `cargo metadata` so that no tool has to be compiled first.

use cargo_metadata::MetadataCommand;
use serde::Deserialize;

#[derive(Deserialize)]
struct Policy {
    licenses: Licenses,
    bans: Bans,
}

#[derive(Deserialize)]
struct Licenses {
    allow: Vec<String>,
}

#[derive(Deserialize)]
struct Bans {
    deny: Vec<Ban>,
}

#[derive(Deserialize)]
struct Ban {
    #[serde(rename = "crate")]
    name: String,
}

#[test]
fn dependencies_keep_the_policy() {
    let root = env!("CARGO_MANIFEST_DIR");
    let text = std::fs::read_to_string(format!("{root}/deny.toml")).expect("deny.toml");
    let policy: Policy = toml::from_str(&text).expect("deny.toml parses");
    let metadata = MetadataCommand::new()
        .other_options(vec!["--locked".into(), "--filter-platform".into(), "x86_64-unknown-linux-gnu".into()])
        .exec()
        .expect("cargo metadata");
    let mut problems = Vec::new();
    for package in &metadata.packages {
        let name = package.name.as_str();
        match &package.source {
            None => continue,
            Some(source) if !source.is_crates_io() => problems.push(format!("{name} comes from {source}")),
            Some(_) => {}
        }
        if policy.bans.deny.iter().any(|ban| ban.name == name) {
            problems.push(format!("{name} is banned"));
        }
        let license = package.license.as_deref().unwrap_or("");
        if !satisfied(license, &policy.licenses.allow) {
            problems.push(format!("{name} has licence {license:?}, which deny.toml does not allow"));
        }
    }
    assert!(metadata.packages.len() > 50, "cargo metadata lists the dependencies");
    assert!(problems.is_empty(), "{problems:#?}");
}

/// An SPDX expression of AND, OR, `/` and parentheses holds when one alternative has only allowed parts.
fn satisfied(expression: &str, allow: &[String]) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let mut position = 0;
    let value = alternatives(&tokens, &mut position, allow);
    value && position == tokens.len()
}

fn alternatives(tokens: &[&str], position: &mut usize, allow: &[String]) -> bool {
    let mut value = conjunction(tokens, position, allow);
    while tokens.get(*position) == Some(&"OR") {
        *position += 1;
        value |= conjunction(tokens, position, allow);
    }
    value
}

fn conjunction(tokens: &[&str], position: &mut usize, allow: &[String]) -> bool {
    let mut value = part(tokens, position, allow);
    while tokens.get(*position) == Some(&"AND") {
        *position += 1;
        value &= part(tokens, position, allow);
    }
    value
}

fn part(tokens: &[&str], position: &mut usize, allow: &[String]) -> bool {
    let Some(&first) = tokens.get(*position) else { return false };
    *position += 1;
    if first == "(" {
        let value = alternatives(tokens, position, allow);
        let closed = tokens.get(*position) == Some(&")");
        *position += 1;
        return value && closed;
    }
    let mut name = first.to_owned();
    if tokens.get(*position) == Some(&"WITH") {
        name = format!("{first} WITH {}", tokens.get(*position + 1).copied().unwrap_or_default());
        *position += 2;
    }
    allow.contains(&name)
}

#[test]
fn licence_expressions_are_understood() {
    let allow = ["MIT".to_owned(), "Apache-2.0 WITH LLVM-exception".to_owned()];
    for (expression, expected) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("GPL-3.0 OR MIT", true),
        ("MIT/GPL-3.0", true),
        ("MIT AND GPL-3.0", false),
        ("(MIT OR GPL-3.0) AND MIT", true),
        ("Apache-2.0 WITH LLVM-exception", true),
        ("", false),
    ] {
        assert_eq!(satisfied(expression, &allow), expected, "{expression:?}");
    }
}
