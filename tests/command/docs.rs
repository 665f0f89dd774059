//! The documents: every link leads somewhere. `src/args/examples.rs` parses their commands.

use std::path::{Path, PathBuf};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

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
