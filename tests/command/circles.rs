//! Import cycles within a crate: sets of files each of which reaches all others through imports.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use cargo_metadata::{MetadataCommand, Package, TargetKind};

use crate::imports::{Graph, Imports, imports};

/// The largest allowed cycle, in files.
const CIRCLE: usize = 5;

/// Crates with larger cycles, and their sizes. The numbers may only fall.
const ALLOWED: &[(&str, &[usize])] = &[
    // Clap's argument tree: each subcommand's arguments use the root's names and help.
    ("semmoe", &[14]),
];

fn reached(graph: &Graph, start: &Path) -> BTreeSet<PathBuf> {
    let (mut seen, mut open) = (BTreeSet::new(), vec![start.to_owned()]);
    while let Some(next) = open.pop() {
        open.extend(graph[&next].iter().filter(|file| seen.insert((*file).clone())).cloned());
    }
    seen
}

/// Strongly connected sets of more than `most` files, the largest first.
fn circles(graph: &Graph, most: usize) -> Vec<BTreeSet<PathBuf>> {
    let reach: BTreeMap<_, _> = graph.keys().map(|file| (file, reached(graph, file))).collect();
    let circle = |file: &PathBuf| reach[file].iter().filter(|other| reach[other].contains(file)).cloned().collect();
    let found: BTreeSet<BTreeSet<PathBuf>> = graph.keys().map(circle).collect();
    let mut large: Vec<_> = found.into_iter().filter(|circle| circle.len() > most).collect();
    large.sort_by_key(|circle| std::cmp::Reverse(circle.len()));
    large
}

/// The imports of all programs and the library of a package.
fn imports_of(package: &Package) -> Imports {
    let mut all = Imports { files: Graph::new(), lost: Vec::new() };
    let apart = [TargetKind::Test, TargetKind::Bench, TargetKind::Example, TargetKind::CustomBuild];
    for target in package.targets.iter().filter(|target| !target.kind.iter().any(|kind| apart.contains(kind))) {
        let found = imports(target.src_path.as_std_path(), &|file| std::fs::read_to_string(file).ok());
        all.lost.extend(found.lost);
        for (file, imported) in found.files {
            all.files.entry(file).or_default().extend(imported);
        }
    }
    all
}

#[test]
fn no_circle_of_imports_has_more_than_five_files() {
    let metadata = MetadataCommand::new().no_deps().exec().expect("cargo metadata");
    let mut problems = Vec::new();
    for package in &metadata.packages {
        let Imports { files, lost } = imports_of(package);
        problems.extend(lost.into_iter().map(|path| format!("no such name: {path}")));
        let allowed =
            ALLOWED.iter().find(|(name, _)| *name == package.name.as_str()).map_or(&[][..], |(_, sizes)| sizes);
        let found = circles(&files, CIRCLE);
        let sizes: Vec<_> = found.iter().map(BTreeSet::len).collect();
        if sizes != allowed {
            let lists = found.iter().map(|circle| listed(circle, metadata.workspace_root.as_std_path()));
            let lists = lists.collect::<Vec<_>>().join("\n  ");
            problems.push(format!("{}: circles of {sizes:?} files, in ALLOWED {allowed:?}:\n  {lists}", package.name));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

fn listed(files: &BTreeSet<PathBuf>, root: &Path) -> String {
    let names = files.iter().map(|file| file.strip_prefix(root).unwrap_or(file).display().to_string());
    names.collect::<Vec<_>>().join(" ")
}

/// The cycle of a crate given as `src`, by file names.
fn circle_of(sources: &[(&str, &str)]) -> String {
    let source = |file: &Path| {
        let text = sources.iter().find(|(name, _)| Path::new("src").join(name) == file);
        text.map(|(_, text)| (*text).to_owned())
    };
    let Imports { files, lost } = imports(Path::new("src/lib.rs"), &source);
    assert!(lost.is_empty(), "{lost:?}");
    circles(&files, 1).first().map_or_else(String::new, |circle| listed(circle, Path::new("src")))
}

#[test]
fn finds_a_circle_through_re_exports() {
    let sources = [
        ("lib.rs", "mod first; mod second; pub use second::Two; pub(crate) use first::*;"),
        ("first.rs", "use crate::Two; pub struct One(Two);"),
        ("second.rs", "pub struct Two; impl Two { fn one() -> Option<crate::One> { None } }"),
    ];
    assert_eq!(circle_of(&sources), "first.rs second.rs");
}

#[test]
fn finds_a_circle_through_a_child() {
    let sources = [
        ("lib.rs", "mod parent;"),
        ("parent/mod.rs", "mod child; pub struct Whole { part: child::Part }"),
        ("parent/child.rs", "mod below; pub struct Part; fn made() { assert!(below::holds()) }"),
        ("parent/child/below.rs", "pub fn holds() -> bool { use super::super::Whole; true }"),
    ];
    assert_eq!(circle_of(&sources), "parent/child/below.rs parent/child.rs parent/mod.rs");
}

#[test]
fn finds_names_that_macros_make_or_take() {
    const IDS: &str = "#[macro_export] macro_rules! ids { ($($name:ident)*) => { $(pub struct $name;)* } }";
    let makes = format!("{IDS} fn three(_: crate::second::Three) {{}}");
    let takes = format!("{IDS} fn two() {{ println!(\"{{}}\", crate::second::two()) }}");
    for first in [makes, takes] {
        let sources = [
            ("lib.rs", "mod first; mod second;"),
            ("first.rs", &first),
            ("second.rs", "crate::ids! { Two Three } pub fn two() -> u8 { 2 }"),
        ];
        assert_eq!(circle_of(&sources), "first.rs second.rs", "{first}");
    }
}

#[test]
fn tests_re_exports_and_modules_in_passing_are_no_imports() {
    let sources = [
        ("lib.rs", "mod first; mod second; pub use first::One;"),
        (
            "first.rs",
            "pub struct One; #[cfg(test)] mod tests { use crate::second::Two; } pub(in crate::first) fn f() {}",
        ),
        ("second.rs", "mod third; pub struct Two(crate::One);"),
        ("second/third.rs", "pub fn two(_: super::super::first::One) {} #[cfg(all(test, unix))] use super::Two;"),
    ];
    assert_eq!(circle_of(&sources), "");
}

#[test]
fn a_function_named_as_a_module_is_not_what_its_paths_begin_with() {
    let sources = [
        ("lib.rs", "mod first; mod second; fn second(_: first::One) {}"),
        ("first.rs", "pub struct One(crate::second::Two);"),
        ("second.rs", "pub struct Two;"),
    ];
    assert_eq!(circle_of(&sources), "");
}
