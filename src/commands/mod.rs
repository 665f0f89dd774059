//! One module a subcommand: arguments to library calls, results to the terminal.

pub(crate) mod evaluate;
pub(crate) mod export;
pub(crate) mod permute;
pub(crate) mod profile;
pub(crate) mod serve;
pub(crate) mod solve;
pub(crate) mod tables;
pub(crate) mod worker;

use std::io::Write;
use std::path::Path;

use serde::Serialize;

use crate::error::CliError;
use crate::progress::say;

/// Prints text on standard output; a reader that went away is an error, not a panic.
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}")
        .and_then(|()| out.flush())
        .map_err(|error| CliError::failed(format!("cannot write to standard output: {error}")))
}

/// Prints what a server has to tell whoever started it. That one may have closed the pipe since: no reason to stop serving.
pub(crate) fn announce(text: &str) {
    if let Err(error) = print(text) {
        say(&format!("semmoe: {error}"));
    }
}

/// Prints one JSON document on standard output.
pub(crate) fn print_json(value: &impl Serialize) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| CliError::failed(format!("the result cannot be written as JSON: {error}")))?;
    print(&text)
}

/// Refuses to write over a file that is read: by another spelling of its path, or through a link.
pub(crate) fn refuse_input_as_output(out: &Path, inputs: &[&Path]) -> Result<(), CliError> {
    let Ok(resolved) = out.canonicalize() else { return Ok(()) };
    match inputs.iter().find(|input| input.canonicalize().is_ok_and(|input| input == resolved)) {
        None => Ok(()),
        Some(input) => Err(CliError::input(format!(
            "the output {} is the input {}, expected another file",
            out.display(),
            input.display()
        ))),
    }
}
