//! Checks that every subcommand's help has an example, and that all examples and all commands in the docs parse.

use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory, Parser};

use super::Cli;

/// Collects the names and long help texts of all executable subcommands.
fn helps(command: &mut Command, name: &str, found: &mut Vec<(String, String)>) {
    let inner: Vec<String> = command.get_subcommands().map(|inner| inner.get_name().to_owned()).collect();
    let inner: Vec<String> = inner.into_iter().filter(|inner| inner != "help").collect();
    if inner.is_empty() || name == "semmoe" {
        // Wide enough that no example is wrapped.
        let help = command.clone().term_width(1000).max_term_width(1000).render_long_help();
        found.push((name.to_owned(), help.to_string()));
    }
    for inner in inner {
        let command = command.find_subcommand_mut(&inner).expect("listed");
        helps(command, &format!("{name} {inner}"), found);
    }
}

/// Returns the command lines in a help text, joining continued lines and removing redirections and pipes.
fn examples(help: &str) -> Vec<Vec<String>> {
    let whole = help.replace("\\\n      ", " ").replace("\\\n    ", " ");
    let lines = whole.lines().filter(|line| line.starts_with("  semmoe "));
    lines
        .map(|line| {
            let command = line.split(" > ").next().and_then(|line| line.split(" < ").next()).unwrap_or(line);
            // Three spaces separate the command from a remark.
            let command = command.trim().split("   ").next().unwrap_or(command);
            command.split_whitespace().map(str::to_owned).collect()
        })
        .collect()
}

#[test]
fn every_example_of_a_help_text_is_understood() {
    let mut found = Vec::new();
    let mut command = Cli::command();
    command.build();
    helps(&mut command, "semmoe", &mut found);
    assert!(found.len() >= 15, "{}", found.len());
    for (name, help) in found {
        let examples = examples(&help);
        let of_it = |words: &Vec<String>| format!("{} ", words.join(" ")).starts_with(&format!("{name} "));
        assert!(examples.iter().any(of_it), "`{name} --help` has no example of it:\n{help}");
        // Longer lines would wrap, which breaks copying and pasting.
        let wide = help.lines().find(|line| line.starts_with("  semmoe ") && line.len() > 100);
        assert_eq!(wide, None, "in `{name} --help`");
        for words in examples {
            if let Err(error) = Cli::try_parse_from(&words) {
                panic!("an example of `{name} --help` is refused: {}\n{error}", words.join(" "));
            }
        }
    }
}

/// All Markdown files in the repository.
fn documents(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() && !path.is_symlink() && !name.starts_with('.') && !["target", "shared"].contains(&name) {
            documents(&path, found);
        } else if path.extension().is_some_and(|kind| kind == "md") {
            found.push(path);
        }
    }
}

/// Splits the commands in a `sh` block into words, as a shell would.
fn commands(block: &str) -> Vec<Vec<String>> {
    let (mut found, mut words, mut word, mut quote) = (Vec::new(), Vec::new(), None::<String>, None);
    let block = block.replace("\\\n", " ") + "\n";
    let mut letters = block.chars().peekable();
    while let Some(letter) = letters.next() {
        match (quote, letter) {
            (Some(open), _) if letter == open => quote = None,
            (Some(_), _) => word.get_or_insert_default().push(letter),
            (None, '\'' | '"') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => while letters.next_if(|letter| *letter != '\n').is_some() {},
            (None, ' ' | '\n' | '|' | '&' | ';' | '<' | '>') => {
                words.extend(word.take());
                if letter != ' ' {
                    found.push(std::mem::take(&mut words));
                }
            }
            (None, _) => word.get_or_insert_default().push(letter),
        }
    }
    found
}

#[test]
fn every_command_of_the_documents_is_understood() {
    let mut files = Vec::new();
    documents(Path::new(env!("CARGO_MANIFEST_DIR")), &mut files);
    let mut checked = 0;
    for file in files {
        let text = std::fs::read_to_string(&file).expect("a document");
        let blocks = text.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap_or(rest));
        for words in blocks.flat_map(commands) {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let arguments = match words[..] {
                ["semmoe" | "target/release/semmoe", ref arguments @ ..] => arguments,
                ["cargo", "run", "--release", "--", ref arguments @ ..] => arguments,
                _ => continue,
            };
            // clap reports `--help` and `--version` as errors.
            let parsed = Cli::try_parse_from(std::iter::once(&"semmoe").chain(arguments));
            if let Err(error) =
                parsed.map(drop).or_else(|error| if error.exit_code() == 0 { Ok(()) } else { Err(error) })
            {
                panic!("{}: {}\n{error}", file.display(), words.join(" "));
            }
            checked += 1;
        }
    }
    assert!(checked > 50, "{checked}");
}
