//! The layers of ARCHITECTURE.md, checked against `cargo metadata`: an import points only to a lower layer, never
//! sideways, and the pure crates perform no I/O.

use std::collections::{BTreeMap, BTreeSet};

use cargo_metadata::{DependencyKind, MetadataCommand};

const LAYERS: &[(u8, &[&str])] = &[
    (0, &["semmoe-tables", "semmoe-kernels"]),
    (1, &["semmoe-reference"]),
    (2, &["semmoe-text", "semmoe-routing", "semmoe-planner", "semmoe-ranks", "semmoe-kernels-cuda"]),
    (3, &["semmoe-solver", "semmoe-engines", "semmoe-kernels-capi", "semmoe-kernels-shim"]),
    (4, &["semmoe-mock-engine", "semmoe-kernels-capi-shim"]),
    (5, &["semmoe-profiler", "semmoe-load"]),
    (6, &["semmoe-gateway", "semmoe-worker"]),
    (
        7,
        &[
            "semmoe",
            "semmoe-bench-placement",
            "semmoe-bench-replay",
            "semmoe-bench-papers",
            "semmoe-bench-parts",
            "semmoe-bench-gateway",
            "semmoe-bench-gpu",
            "semmoe-fuzz",
            "semmoe-worker-shim",
        ],
    ),
    (8, &["semmoe-bench-e2e", "semmoe-bench-switch"]),
    (9, &["semmoe-bench-hybrid"]),
];

const PURE: &[&str] =
    &["semmoe-tables", "semmoe-kernels", "semmoe-text", "semmoe-routing", "semmoe-planner", "semmoe-solver"];

/// Direct dependencies that a pure crate must not have.
const IMPURE: &[&str] = &[
    "tokio",
    "hyper",
    "hyper-util",
    "axum",
    "rustix",
    "mio",
    "socket2",
    "rand",
    "getrandom",
    "tracing",
    "indicatif",
    "clap",
];

/// Paths that a pure crate's sources must not mention: wall clock, environment, sockets, processes, printing.
const IMPURE_PATHS: &[&str] = &[
    "std::env",
    "std::net",
    "std::process",
    "SystemTime",
    "Instant::now",
    "println!",
    "eprintln!",
    "fastrand::Rng::new()",
];

fn layer_of(name: &str) -> Option<u8> {
    LAYERS.iter().find(|(_, names)| names.contains(&name)).map(|(layer, _)| *layer)
}

#[test]
fn every_crate_has_a_layer_and_imports_only_lower_ones() {
    let metadata = MetadataCommand::new().no_deps().exec().expect("cargo metadata");
    let mut problems = Vec::new();
    let mut seen = BTreeSet::new();
    for package in &metadata.packages {
        let name = package.name.as_str();
        seen.insert(name.to_owned());
        let Some(layer) = layer_of(name) else {
            problems.push(format!("{name} has no layer"));
            continue;
        };
        for dependency in &package.dependencies {
            let lower = layer_of(&dependency.name);
            if lower.is_some_and(|lower| lower >= layer) {
                problems.push(format!("{name} (layer {layer}) imports {} (layer {lower:?})", dependency.name));
            }
            if PURE.contains(&name)
                && dependency.kind == DependencyKind::Normal
                && IMPURE.contains(&dependency.name.as_str())
            {
                problems.push(format!("{name} must be pure, but imports {}", dependency.name));
            }
        }
    }
    let expected: BTreeSet<String> =
        LAYERS.iter().flat_map(|(_, names)| names.iter().map(|n| (*n).to_owned())).collect();
    assert_eq!(seen, expected, "the layer table and the workspace differ");
    assert!(problems.is_empty(), "{problems:#?}");
}

#[test]
fn pure_crates_do_no_input_output() {
    let metadata = MetadataCommand::new().no_deps().exec().expect("cargo metadata");
    let mut found: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for package in metadata.packages.iter().filter(|package| PURE.contains(&package.name.as_str())) {
        let folder = package.manifest_path.with_file_name("src");
        for file in rust_files(folder.as_std_path()) {
            let text = std::fs::read_to_string(&file).expect("readable source");
            let code = text.split("#[cfg(test)]").next().unwrap_or_default();
            for path in IMPURE_PATHS.iter().filter(|path| code.contains(**path)) {
                found.entry(file.display().to_string()).or_default().push(path);
            }
        }
    }
    assert!(found.is_empty(), "pure crates mention impure names: {found:#?}");
}

/// Packages that read the clock, the environment or randomness, open sockets, or start threads.
const IMPURE_DEPENDENCIES: &[&str] = &[
    "tokio",
    "hyper",
    "mio",
    "socket2",
    "rustix",
    "rand",
    "getrandom",
    "rayon-core",
    "tempfile",
    "fastokens",
    "tokenizers",
    "tracing",
    "clap",
    "reqwest",
    "ureq",
];

/// Direct dependencies through which pure crates may reach impure packages, and why no result depends on it.
const EXCEPTIONS: &[(&str, &str, &str)] = &[
    ("semmoe-tables", "tempfile", "random names of temporary files, which are then renamed; never their content"),
    ("semmoe-text", "tokenizers", "randomness only in training and dropout; one environment variable sets its threads"),
    ("semmoe-text", "fastokens", "FASTOKENS_* variables set its threads and caches; its ids are checked at every load"),
];

#[test]
fn dependencies_of_pure_crates_are_pure_or_named() {
    let platform = vec!["--locked".into(), "--filter-platform".into(), "x86_64-unknown-linux-gnu".into()];
    let metadata = MetadataCommand::new().other_options(platform).exec().expect("cargo metadata");
    let resolve = metadata.resolve.as_ref().expect("a resolved graph");
    let names: BTreeMap<_, _> = metadata.packages.iter().map(|package| (&package.id, package.name.as_str())).collect();
    let below: BTreeMap<_, Vec<_>> = resolve
        .nodes
        .iter()
        .map(|node| {
            let normal =
                |dep: &&cargo_metadata::NodeDep| dep.dep_kinds.iter().any(|kind| kind.kind == DependencyKind::Normal);
            (&node.id, node.deps.iter().filter(normal).map(|dep| &dep.pkg).collect())
        })
        .collect();
    let (mut problems, mut used) = (Vec::new(), BTreeSet::new());
    for (root, name) in names.iter().filter(|(_, name)| PURE.contains(name)) {
        for first in below[*root].iter().filter(|first| !PURE.contains(&names[**first])) {
            let (mut seen, mut open) = (BTreeSet::from([*first]), vec![*first]);
            while let Some(next) = open.pop() {
                open.extend(below[next].iter().filter(|package| seen.insert(**package)));
            }
            let impure: Vec<_> =
                seen.iter().map(|id| names[*id]).filter(|dep| IMPURE_DEPENDENCIES.contains(dep)).collect();
            match EXCEPTIONS.iter().find(|(pure, dep, _)| pure == name && *dep == names[*first]) {
                Some((pure, dep, _)) if !impure.is_empty() => {
                    used.insert((*pure, *dep));
                }
                _ if impure.is_empty() => {}
                _ => problems.push(format!("{name} reaches {impure:?} through {}", names[*first])),
            }
        }
    }
    assert!(problems.is_empty(), "{problems:#?}");
    let named: BTreeSet<_> = EXCEPTIONS.iter().map(|(pure, dep, _)| (*pure, *dep)).collect();
    assert_eq!(used, named, "unused exceptions");
}

/// Functions that add rows of several ranks, and functions that send data between them. The worker calls only the
/// interface of the collectives.
const ARITHMETIC: &[&str] = &["sum_rows", "norm_row"];

#[test]
fn the_arithmetic_of_collectives_stands_in_the_kernels_alone() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let holding = |folder: &str, words: &[&str]| -> BTreeSet<String> {
        let holds = |file: &std::path::Path| {
            let text = std::fs::read_to_string(file).expect("readable source");
            words.iter().any(|word| text.contains(word))
        };
        let files = rust_files(&root.join(folder)).into_iter().filter(|file| holds(file));
        files.map(|file| file.strip_prefix(root).expect("below the root").display().to_string()).collect()
    };
    for folder in ["worker/src", "planner/src", "gateway/src", "solver/src", "src"] {
        assert_eq!(holding(folder, ARITHMETIC), BTreeSet::new(), "sums over ranks outside the kernels");
    }
    // The implementations of the interface over bytes, and the one word that ranks send besides rows.
    let sends = holding("worker/src", &["all_to_all("]);
    let allowed = ["worker/src/ep/exchange.rs", "worker/src/ep/shm/tests.rs", "worker/src/ep/stream/mod.rs"];
    assert_eq!(sends, allowed.map(str::to_owned).into(), "bytes between ranks past the collectives");
}

#[test]
fn cuda_is_reached_by_its_feature_alone() {
    let reached = |more: &[&str]| {
        let mut tree = std::process::Command::new(env!("CARGO"));
        tree.args(["tree", "--locked", "-p", "semmoe", "-e", "normal", "--prefix", "none"]).args(more);
        let output = tree.current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("cargo tree");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        ["cudarc ", "semmoe-kernels-cuda "].map(|name| text.lines().any(|line| line.starts_with(name)))
    };
    assert_eq!(reached(&["--features", "cuda"]), [true; 2]);
    assert_eq!(reached(&[]), [false; 2], "without it the command is unchanged");
}

fn rust_files(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a source folder").map(|entry| entry.expect("entry").path()) {
        if entry.is_dir() {
            files.extend(rust_files(&entry));
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            files.push(entry);
        }
    }
    files
}
