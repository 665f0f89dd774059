//! One module per subcommand: each translates arguments into library calls and prints the results.

pub(crate) mod build;
pub(crate) mod evaluate;
pub(crate) mod export;
mod figures;
pub(crate) mod import;
pub(crate) mod keys;
pub(crate) mod load;
pub(crate) mod outcome;
pub(crate) mod pages;
pub(crate) mod permute;
pub(crate) mod placement;
pub(crate) mod plan;
pub(crate) mod profile;
mod quick;
pub(crate) mod serve;
pub(crate) mod shell;
pub(crate) mod show;
pub(crate) mod solve;
pub(crate) mod tables;
pub(crate) mod template;
mod watch;
pub(crate) mod worker;

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use semmoe_engines::http::BaseUrl;
use serde::Serialize;

use crate::args::OutputArgs;
use crate::error::CliError;
use crate::progress::say;

/// Prints text to standard output. If the reader has closed the pipe (`| head`), the command continues silently, and
/// its exit code is unaffected.
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(|error| CliError::failed(format!("cannot write to standard output: {error}"))),
    }
}

/// Announces a server on standard output. If that fails, the server keeps running.
pub(crate) fn announce(text: &str) {
    if let Err(error) = print(text) {
        say(&format!("semmoe: {error}"));
    }
}

/// Prints one JSON document to standard output: an object whose first field is the subcommand's name.
pub(crate) fn print_json(command: &str, value: &impl Serialize) -> Result<(), CliError> {
    #[derive(Serialize)]
    struct Document<'a, T> {
        command: &'a str,
        #[serde(flatten)]
        value: &'a T,
    }
    let text = serde_json::to_string_pretty(&Document { command, value })
        .map_err(|error| CliError::failed(format!("cannot write the result as JSON: {error}")))?;
    print(&text)
}

/// Prints a result as JSON if requested, otherwise as text.
pub(crate) fn print_result(
    output: OutputArgs,
    command: &str,
    value: &impl Serialize,
    text: impl FnOnce() -> String,
) -> Result<(), CliError> {
    if output.json { print_json(command, value) } else { print(text().trim_end()) }
}

/// Reads a text file of at most `most` bytes; error messages call it `what`.
pub(crate) fn read_text(path: &Path, what: &str, most: u64) -> Result<String, CliError> {
    let cannot =
        |error: &dyn std::fmt::Display| CliError::input(format!("cannot read the {what} {}: {error}", path.display()));
    let mut text = String::new();
    let file = File::open(path).map_err(|error| cannot(&error))?;
    file.take(most + 1).read_to_string(&mut text).map_err(|error| cannot(&error))?;
    if text.len() as u64 > most {
        return Err(cannot(&format!("more than {most} bytes long")));
    }
    Ok(text)
}

/// Parses `--url`, which may end with `/v1` as OpenAI clients expect.
pub(crate) fn server_url(text: &str) -> Result<BaseUrl, CliError> {
    text.parse().map(BaseUrl::without_v1).map_err(CliError::input)
}

/// Checks before a long operation that `out` can be written: it is neither an input (under any path or link) nor a
/// directory or device, and its directory is writable.
pub(crate) fn check_output<'a>(out: &Path, inputs: impl IntoIterator<Item = &'a PathBuf>) -> Result<(), CliError> {
    if let Ok(there) = out.canonicalize() {
        if let Some(input) = inputs.into_iter().find(|input| input.canonicalize().is_ok_and(|input| input == there)) {
            let (out, input) = (out.display(), input.display());
            return Err(CliError::input(format!("the output {out} is the input {input}, expected another file")));
        }
        if !there.is_file() {
            return Err(CliError::input(format!("the output {} exists and is not a regular file", out.display())));
        }
    }
    // An unnamed temporary file leaves nothing behind.
    let file = tempfile::tempfile_in(semmoe_tables::directory_of(out));
    file.map(drop).map_err(|error| CliError::cannot_write(out, error))
}

/// Checks that all files can be opened, before contacting a server.
pub(crate) fn check_inputs<'a>(inputs: impl IntoIterator<Item = &'a PathBuf>) -> Result<(), CliError> {
    inputs.into_iter().try_for_each(|path| match File::open(path) {
        Ok(_) => Ok(()),
        Err(error) => Err(CliError::input(format!("cannot read {}: {error}", path.display()))),
    })
}

/// Rejects two outputs with the same path.
pub(crate) fn check_apart(one: &Path, other: &Path) -> Result<(), CliError> {
    let same = std::path::absolute(one).ok().zip(std::path::absolute(other).ok()).is_some_and(|(a, b)| a == b);
    if same {
        return Err(CliError::input(format!("two outputs are {}, expected different files", one.display())));
    }
    Ok(())
}
