//! Commands in the documents: every `semmoe` line has a subcommand and options that there are.

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
    let mut files = vec![format!("{ROOT}/README.md")];
    for entry in std::fs::read_dir(format!("{ROOT}/docs")).expect("docs") {
        let path = entry.expect("an entry").path();
        if path.extension().is_some_and(|kind| kind == "md") {
            files.push(path.to_str().expect("a plain name").to_owned());
        }
    }
    let mut checked = 0;
    for file in files {
        let text = std::fs::read_to_string(&file).expect("a document");
        for command in commands(&text) {
            let words: Vec<&str> = command.split_whitespace().skip(1).collect();
            let first = words.iter().position(|word| !word.starts_with('-')).unwrap_or(0);
            // `--log debug serve`: options of all subcommands have one value.
            let from = if first > 0 && words[0] == "--log" { first + 1 } else { first };
            let depth = if NESTED.contains(&words[from]) { 2 } else { 1 };
            let path = &words[from..from + depth];
            let told =
                Command::new(env!("CARGO_BIN_EXE_semmoe")).args(path).arg("--help").output().expect("semmoe runs");
            assert!(told.status.success(), "{file}: {command}");
            let help = String::from_utf8_lossy(&told.stdout).into_owned();
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
