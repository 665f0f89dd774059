//! docs/configuration.md lists exactly the configuration's keys, with their defaults; and what the other documents name
//! exists.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use semmoe_gateway::{Config, RawConfig};

const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs");
/// A key that no section has.
const STRANGE: &str = "zz_strange";

fn document(name: &str) -> String {
    std::fs::read_to_string(format!("{DOCS}/{name}")).unwrap()
}

/// Each section's keys with their defaults.
fn reference() -> BTreeMap<String, BTreeMap<String, String>> {
    let text = document("configuration.md");
    let mut sections = BTreeMap::new();
    for part in text.split("\n## `").skip(1) {
        let (header, rest) = part.split_once('`').unwrap();
        let rows = rest.lines().filter(|line| line.starts_with("| `")).map(|line| {
            let mut cells = line.split(" | ").map(|cell| cell.trim_matches(['|', ' ', '`']).to_owned());
            (cells.next().unwrap(), cells.next().unwrap())
        });
        assert!(sections.insert(header.to_owned(), rows.collect()).is_none(), "{header} stands there twice");
    }
    sections
}

/// A document that contains a section, with `line` in it.
fn within(header: &str, line: &str) -> String {
    let above = match header.trim_matches(['[', ']']).rsplit_once('.') {
        Some(("models", _)) => "[[models]]\n",
        Some(("models.backends", _)) => "[[models]]\n[[models.backends]]\n",
        Some(("models.discovery", _)) => "[[models]]\n[[models.discovery]]\n",
        _ => "",
    };
    // For two structs in one, the error names the unknown key last.
    let needed = if header == "[[models.discovery]]" { "name = \"n\"\nengine = \"sglang\"\n" } else { "" };
    format!("{above}{header}\n{needed}{line}\n")
}

#[test]
fn the_reference_has_every_key_and_no_other() {
    let sections = reference();
    assert!(sections.len() > 20, "{}", sections.len());
    for (header, keys) in &sections {
        let text = within(header, &format!("{STRANGE} = 1"));
        let error = Config::from_toml(&text, Path::new("")).unwrap_err().to_string();
        let (_, expected) = error.split_once(STRANGE).unwrap_or_else(|| panic!("{header}: {error}"));
        let expected: BTreeSet<&str> = expected.split('`').skip(2).step_by(2).collect();
        let documented: BTreeSet<&str> = keys.keys().map(String::as_str).collect();
        // The keys that a source shares with backends are not documented.
        if header == "[[models.discovery]]" {
            assert!(expected.is_empty(), "{error}");
            for key in documented {
                let text = within(header, &format!("{key} = false"));
                let error = Config::from_toml(&text, Path::new("")).unwrap_err().to_string();
                assert!(error.contains("invalid type"), "{key}: {error}");
            }
            continue;
        }
        assert_eq!(documented, expected, "{header}");
    }
    // A key that is a section is documented in its own part.
    for (header, keys) in &sections {
        for (key, _) in keys.iter().filter(|(_, default)| *default == "section") {
            let name = format!("{}.{key}", header.trim_matches(['[', ']'])).replace("admin_tls", "tls");
            let name = name.replace("discovery.tls", "backends.tls");
            let reported = [format!("[{name}]"), format!("[[{name}]]")];
            assert!(reported.iter().any(|reported| sections.contains_key(reported)), "{name} has no part");
        }
    }
}

#[test]
fn the_defaults_are_those_of_the_reference() {
    let mut text = String::new();
    let mut checked = 0;
    let literals = |keys: &BTreeMap<String, String>| {
        let literal = |default: &String| !["none", "needed", "section"].contains(&default.as_str());
        let lines = keys.iter().filter(|(_, default)| literal(default));
        lines.map(|(key, default)| format!("{key} = {default}\n")).collect::<Vec<_>>()
    };
    let sections = reference();
    let single = |header: &str| !header.starts_with("[[") && !header.contains("models.") && !header.contains("tls");
    for (header, keys) in sections.iter().filter(|(header, _)| single(header)) {
        let lines = literals(keys);
        checked += lines.len();
        text.push_str(&format!("{header}\n{}", lines.concat()));
    }
    let reported: RawConfig = toml::from_str(&text).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(reported, RawConfig::default());
    assert!(checked > 60, "{checked}");
    for header in ["[[models]]", "[[models.backends]]", "[[models.discovery]]"] {
        let (mut bare, mut full) = (String::new(), String::new());
        for (section, needed) in [("[[models]]", "name = \"m\"\n"), (header, "name = \"n\"\nengine = \"e\"\n")]
            .into_iter()
            .take(if header == "[[models]]" { 1 } else { 2 })
        {
            bare.push_str(&format!("{section}\n{needed}"));
            let lines = if section == header { literals(&sections[header]).concat() } else { String::new() };
            full.push_str(&format!("{section}\n{needed}{lines}"));
        }
        let parse = |text: &str| toml::from_str::<RawConfig>(text).unwrap_or_else(|error| panic!("{error} in {text}"));
        assert_eq!(parse(&full), parse(&bare), "{header}");
    }
}

/// Every key in the examples of the other documents, including commented ones.
#[test]
fn documents_name_keys_that_exist() {
    let sections = reference();
    let all: BTreeSet<&String> = sections.values().flat_map(BTreeMap::keys).collect();
    let mut checked = 0;
    for name in [
        "api.md",
        "deploy.md",
        "engines.md",
        "operating.md",
        "profile-and-solve.md",
        "routing.md",
        "security.md",
        "switching.md",
    ] {
        let text = document(name);
        for block in text.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap()) {
            let mut section: Option<&BTreeMap<String, String>> = None;
            let mut shared = None;
            for line in block.lines() {
                let line = line.trim_start_matches("# ");
                let header = line.split('#').next().unwrap().trim();
                if header.starts_with('[') && header.ends_with(']') && !header.contains('=') {
                    let of_backends = header.replace("discovery.tls", "backends.tls").replace("admin_tls", "tls");
                    section = Some(sections.get(&of_backends).unwrap_or_else(|| panic!("{name}: no section {header}")));
                    shared = (header == "[[models.discovery]]").then(|| &sections["[[models.backends]]"]);
                    continue;
                }
                let Some((key, _)) = line.split_once(" = ") else { continue };
                let key = key.trim();
                if !key.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_') {
                    continue;
                }
                let known = match section {
                    Some(keys) => keys.contains_key(key) || shared.is_some_and(|keys| keys.contains_key(key)),
                    None => all.contains(&key.to_owned()),
                };
                assert!(known, "{name} names {key}, which is no key there:\n{block}");
                checked += 1;
            }
        }
    }
    assert!(checked > 80, "{checked}");
}

/// The paths in security.md are those of the data plane: that list decides who may reach what.
#[test]
fn the_page_on_security_has_every_route() {
    let text = document("security.md");
    let section = text.split("\n## Routes").nth(1).unwrap().split("Every other path").next().unwrap();
    let words = section.split('`').skip(1).step_by(2).map(|word| word.trim_start_matches("GET "));
    let named: BTreeSet<&str> = words.filter(|word| word.starts_with('/')).collect();
    let routes = semmoe_engines::Route::ALL.map(semmoe_engines::Route::path);
    // The last one belongs to the metrics listener.
    let more = ["/v1/models", "/v1/models/{id}", "/health", "/readyz"];
    assert_eq!(named, routes.into_iter().chain(more).collect());
}

/// The chart passes the keys of these sections through and refuses misspelt ones: its schema has all of them.
#[test]
fn the_charts_schema_has_every_key_and_policy() {
    let schema = std::fs::read_to_string(format!("{DOCS}/../deploy/helm/semmoe/values.schema.json")).unwrap();
    let schema: serde_json::Value = serde_json::from_str(&schema).unwrap();
    let (model, sections) = ("/properties/models/items/properties", reference());
    let engine = format!("{model}/engines/items/properties");
    let keys = |pointer: &str| -> BTreeSet<String> {
        let object = schema.pointer(pointer).and_then(|found| found.as_object());
        object.unwrap_or_else(|| panic!("{pointer}")).keys().cloned().collect()
    };
    let documented = |headers: &[&str], without: &[&str], more: &[&str]| -> BTreeSet<String> {
        let named = headers.iter().flat_map(|header| sections[*header].keys().cloned());
        named.filter(|key| !without.contains(&key.as_str())).chain(more.iter().map(|key| (*key).to_owned())).collect()
    };
    assert_eq!(keys(model), documented(&["[[models]]"], &["backends", "discovery"], &["engines"]));
    let sources = ["[[models.backends]]", "[[models.discovery]]"];
    assert_eq!(keys(&engine), documented(&sources, &["kubernetes"], &["service"]));
    assert_eq!(keys(&format!("{engine}/tls/properties")), documented(&["[models.backends.tls]"], &[], &[]));
    // The chart decides which addresses are served.
    assert_eq!(keys("/properties/server/properties"), documented(&["[server]"], &["listen", "metrics"], &[]));
    assert_eq!(keys("/definitions/server_tls/properties"), documented(&["[server.tls]"], &[], &[]));
    assert_eq!(schema["definitions"]["policy"]["enum"], serde_json::json!(semmoe_routing::NAMES));
    let engines: Vec<&str> = semmoe_engines::Engine::ALL.iter().map(|engine| engine.name()).collect();
    assert_eq!(schema.pointer(&format!("{engine}/engine/enum")).unwrap(), &serde_json::json!(engines));
}
