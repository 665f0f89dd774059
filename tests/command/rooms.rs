//! Rooms of a crate: groups of files whose imports point only to lower rooms.

use std::collections::BTreeMap;
use std::path::Path;

use crate::imports::{Graph, imports};

/// A room, and the path prefixes of its files.
type Room = (&'static str, &'static [&'static str]);

/// The gateway's rooms, the lowest first.
const GATEWAY: &[Room] = &[
    ("config", &["config/"]),
    ("observe", &["metrics", "otlp/", "live/"]),
    (
        "backends",
        &[
            "availability.rs",
            "backend.rs",
            "breaker",
            "budget.rs",
            "compat.rs",
            "current.rs",
            "drains.rs",
            "error",
            "flow.rs",
            "gate.rs",
            "heads.rs",
            "health.rs",
            "names.rs",
            "outgoing.rs",
            "parity",
            "pins",
            "plan.rs",
            "pool",
            "queue.rs",
            "request_id.rs",
            "silence.rs",
            "snapshot.rs",
            "stamp.rs",
            "tables/",
            "verdict.rs",
            "vocabulary.rs",
        ],
    ),
    ("data", &["body_memory.rs", "data/", "outflow.rs", "stall.rs", "state.rs", "trust/"]),
    (
        "shell",
        &[
            "admin/",
            "credentials.rs",
            "discovery/",
            "gateway.rs",
            "lib.rs",
            "load.rs",
            "memory.rs",
            "reload/",
            "server",
            "summary.rs",
            "switching/",
            "watchers.rs",
        ],
    ),
];

/// Allowed imports from a lower room, by the file that they lead to. The numbers may only fall.
const UPWARD: &[(&str, usize)] = &[
    ("backend.rs", 2),
    ("pins/record.rs", 1),
    ("reload/outcome.rs", 1),
    ("server.rs", 1),
    ("snapshot.rs", 3),
    ("state.rs", 10),
    ("switching/record.rs", 1),
    ("tables/mod.rs", 1),
];

/// Imports that point to a higher room, by the file that they lead to.
fn upward(graph: &Graph, folder: &Path, rooms: &[Room]) -> BTreeMap<String, Vec<String>> {
    let inside = |file: &Path| file.strip_prefix(folder).expect("in the folder").display().to_string();
    let room = |file: &str| {
        let of = |(_, starts): &Room| starts.iter().any(|start| file.starts_with(start));
        let mut found = (0..rooms.len()).filter(|at| of(&rooms[*at]));
        let room = found.next().unwrap_or_else(|| panic!("{file} is in no room"));
        assert!(found.next().is_none(), "{file} is in several rooms");
        room
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
fn imports_between_the_gateways_rooms_point_down() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("gateway/src");
    let graph = imports(&folder.join("lib.rs"), &|file| std::fs::read_to_string(file).ok()).files;
    let found = upward(&graph, &folder, GATEWAY);
    let counts: Vec<_> = found.iter().map(|(to, from)| (to.as_str(), from.len())).collect();
    assert_eq!(counts, UPWARD, "{found:#?}");
}

#[test]
fn finds_an_import_that_points_up() {
    let source = |file: &Path| {
        let text = match file.to_str()? {
            "src/lib.rs" => "mod low; mod high;",
            "src/low.rs" => "pub struct Low; fn f() { crate::high::f() }",
            "src/high.rs" => "pub fn f() { let _ = crate::low::Low; }",
            _ => return None,
        };
        Some(text.to_owned())
    };
    let graph = imports(Path::new("src/lib.rs"), &source).files;
    let rooms: &[Room] = &[("low", &["low"]), ("high", &["high", "lib"])];
    let found = upward(&graph, Path::new("src"), rooms);
    assert_eq!(found, BTreeMap::from([("high.rs".to_owned(), vec!["low.rs".to_owned()])]));
    assert!(upward(&graph, Path::new("src"), &[("all", &[""])]).is_empty());
}
