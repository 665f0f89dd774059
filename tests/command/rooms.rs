//! Rooms of a crate: folders whose imports point only to lower rooms.

use std::collections::BTreeMap;
use std::path::Path;

use crate::imports::{Graph, imports};

/// The rooms of a crate, the lowest first. The crate's root is above them.
const ROOMS: &[(&str, &[&str])] = &[
    ("gateway", &["config", "observe", "backends", "data", "shell"]),
    ("solver", &["input", "algebra", "prior", "step", "bounds", "start", "tables", "ranks", "judge", "solve", "paper"]),
];

/// Imports that point to a higher room, by the file that they lead to.
fn upward(graph: &Graph, folder: &Path, rooms: &[&str]) -> BTreeMap<String, Vec<String>> {
    let inside = |file: &Path| file.strip_prefix(folder).expect("in the folder").display().to_string();
    let room = |file: &str| match file.split_once('/') {
        None => rooms.len(),
        Some((of, _)) => rooms.iter().position(|room| *room == of).unwrap_or_else(|| panic!("{file} is in no room")),
    };
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (file, imported) in graph {
        let from = inside(file);
        for to in imported.iter().map(|file| inside(file)).filter(|to| room(to) > room(&from)) {
            found.entry(to).or_default().push(from.clone());
        }
    }
    found
}

#[test]
fn imports_between_rooms_point_down() {
    for (name, rooms) in ROOMS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(name).join("src");
        let graph = imports(&folder.join("lib.rs"), &|file| std::fs::read_to_string(file).ok()).files;
        let found = upward(&graph, &folder, rooms);
        assert!(found.is_empty(), "{name}: {found:#?}");
    }
}

#[test]
fn finds_an_import_that_points_up() {
    let source = |file: &Path| {
        let text = match file.to_str()? {
            "src/lib.rs" => "mod low; mod high;",
            "src/low/mod.rs" => "pub struct Low; fn f() { crate::high::f() }",
            "src/high/mod.rs" => "pub fn f() { let _ = crate::low::Low; }",
            _ => return None,
        };
        Some(text.to_owned())
    };
    let graph = imports(Path::new("src/lib.rs"), &source).files;
    let found = upward(&graph, Path::new("src"), &["low", "high"]);
    assert_eq!(found, BTreeMap::from([("high/mod.rs".to_owned(), vec!["low/mod.rs".to_owned()])]));
    let other_way = upward(&graph, Path::new("src"), &["high", "low"]);
    assert_eq!(other_way, BTreeMap::from([("low/mod.rs".to_owned(), vec!["high/mod.rs".to_owned()])]));
}
