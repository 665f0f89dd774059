//! The documents: every `semmoe` line has a subcommand and options that there are, and every link leads somewhere.

use std::path::{Path, PathBuf};
use std::process::Command;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
/// Subcommands that have subcommands.
const NESTED: [&str; 3] = ["profile", "tables", "keys"];

/// The lines of all `sh` blocks, each whole.
fn commands(text: &str) -> Vec<String> {
    let blocks = text.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap_or(rest));
    let lines = blocks.flat_map(|block| {
        let whole = block.replace("\\\n", " ");
        whole.lines().map(|line| line.split(" #").next().unwrap_or(line).to_owned()).collect::<Vec<_>>()
    });
    let parts = lines.flat_map(|line| {
        line.split("&&").flat_map(|part| part.split('|')).map(|part| part.trim().to_owned()).collect::<Vec<_>>()
    });
    parts.filter(|part| part.starts_with("semmoe ")).collect()
}

#[test]
fn commands_of_the_documents_are_understood() {
    let mut checked = 0;
    for path in documents() {
        let text = std::fs::read_to_string(&path).expect("a document");
        let file = path.display();
        for command in commands(&text) {
            let words: Vec<&str> = command.split_whitespace().skip(1).collect();
            let first = words.iter().position(|word| !word.starts_with('-')).unwrap_or(words.len());
            // `--log debug serve`: options of all subcommands have one value.
            let from = if first > 0 && words[0] == "--log" { first + 1 } else { first };
            // `plan` works without its subcommand.
            let nested = |word| NESTED.contains(word) || words[from..].starts_with(&["plan", "calibrate"]);
            let depth = words.get(from).map_or(0, |word| if nested(word) { 2 } else { 1 });
            let path = &words[from..from + depth];
            let reported =
                Command::new(env!("CARGO_BIN_EXE_semmoe")).args(path).arg("--help").output().expect("semmoe runs");
            assert!(reported.status.success(), "{file}: {command}");
            let help = String::from_utf8_lossy(&reported.stdout).into_owned();
            for option in words.iter().filter(|word| word.starts_with("--")) {
                let name = option.split('=').next().unwrap_or(option);
                let known = help.split(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '-'));
                assert!(
                    known.into_iter().any(|word| word == name),
                    "{file}: {name} is no option of {path:?}: {command}"
                );
                checked += 1;
            }
        }
    }
    assert!(checked > 40, "{checked}");
}

/// GitHub's anchor of a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|letter| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_'));
    kept.collect::<String>().trim().to_lowercase().replace(' ', "-")
}

/// The anchors of a document's headings.
fn anchors(text: &str) -> Vec<String> {
    let mut code = false;
    let lines = text.lines().filter(|line| {
        code ^= line.trim_start().starts_with("```");
        !code && line.starts_with('#')
    });
    lines.map(|line| anchor(line.trim_start_matches('#'))).collect()
}

/// Documents that users read first: those at the top, in docs/ and in deploy/.
fn documents() -> Vec<PathBuf> {
    let mut files = Vec::new();
    for folder in ["", "docs", "deploy"] {
        let entries = std::fs::read_dir(Path::new(ROOT).join(folder)).expect("a folder");
        let paths = entries.map(|entry| entry.expect("an entry").path());
        files.extend(paths.filter(|path| path.extension().is_some_and(|kind| kind == "md")));
    }
    files
}

#[test]
fn links_between_documents_lead_somewhere() {
    let mut checked = 0;
    for file in documents() {
        let text = std::fs::read_to_string(&file).expect("a document");
        for link in text.split("](").skip(1).map(|rest| rest.split(')').next().unwrap_or(rest)) {
            if link.contains("://") || link.contains(char::is_whitespace) {
                continue;
            }
            let (path, part) = link.split_once('#').unwrap_or((link, ""));
            let target = match path {
                "" => file.clone(),
                path => file.parent().expect("a folder").join(path),
            };
            assert!(target.exists(), "{}: {link} leads nowhere", file.display());
            if !part.is_empty() {
                let found = anchors(&std::fs::read_to_string(&target).expect("a document"));
                assert!(found.iter().any(|anchor| anchor == part), "{}: {link}: no such heading", file.display());
            }
            checked += 1;
        }
    }
    assert!(checked > 100, "{checked}");
}
