//! `semmoe completions` and `semmoe man`, generated from the command's clap definition.

use std::path::Path;

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use super::print;
use crate::args::Cli;
use crate::error::CliError;

pub(crate) fn completions(shell: Shell) -> Result<(), CliError> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "semmoe", &mut script);
    print(String::from_utf8(script).map_err(CliError::failed)?.trim_end())
}

/// Writes one page for the command and one per subcommand: `semmoe.1`, `semmoe-serve.1`, `semmoe-tables-show.1`, ...
pub(crate) fn man(folder: &Path) -> Result<(), CliError> {
    std::fs::create_dir_all(folder).map_err(|error| CliError::cannot_write(folder, error))?;
    let mut command = Cli::command();
    command.build();
    pages(&command, "semmoe", folder)
}

fn pages(command: &Command, name: &str, folder: &Path) -> Result<(), CliError> {
    let mut page = Vec::new();
    Man::new(command.clone()).title(name).render(&mut page).map_err(CliError::failed)?;
    let (path, page) = (folder.join(format!("{name}.1")), String::from_utf8(page).map_err(CliError::failed)?);
    semmoe_tables::export::write(&page, &path).map_err(CliError::failed)?;
    for inner in command.get_subcommands().filter(|inner| inner.get_name() != "help") {
        pages(inner, &format!("{name}-{}", inner.get_name()), folder)?;
    }
    Ok(())
}
