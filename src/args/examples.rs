//! Every subcommand's help has an example, and every example is a command line that is understood.

use clap::{Command, CommandFactory, Parser};

use super::Cli;

/// The long help of each subcommand that does something, by its name.
fn helps(command: &mut Command, name: &str, found: &mut Vec<(String, String)>) {
    let inner: Vec<String> = command.get_subcommands().map(|inner| inner.get_name().to_owned()).collect();
    let inner: Vec<String> = inner.into_iter().filter(|inner| inner != "help").collect();
    if inner.is_empty() || name == "semmoe" {
        // Wide, so that no example is wrapped.
        let help = command.clone().term_width(1000).max_term_width(1000).render_long_help();
        found.push((name.to_owned(), help.to_string()));
    }
    for inner in inner {
        let command = command.find_subcommand_mut(&inner).expect("listed");
        helps(command, &format!("{name} {inner}"), found);
    }
}

/// The command lines in a help text, continued ones whole, without what a shell does with their input and output.
fn examples(help: &str) -> Vec<Vec<String>> {
    let whole = help.replace("\\\n      ", " ").replace("\\\n    ", " ");
    let lines = whole.lines().filter(|line| line.starts_with("  semmoe "));
    lines
        .map(|line| {
            let command = line.split(" > ").next().and_then(|line| line.split(" < ").next()).unwrap_or(line);
            // Three blanks begin a remark.
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
        // Longer lines are wrapped, and can then not be copied.
        let wide = help.lines().find(|line| line.starts_with("  semmoe ") && line.len() > 100);
        assert_eq!(wide, None, "in `{name} --help`");
        for words in examples {
            if let Err(error) = Cli::try_parse_from(&words) {
                panic!("an example of `{name} --help` is refused: {}\n{error}", words.join(" "));
            }
        }
    }
}
