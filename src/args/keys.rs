//! Arguments of `semmoe keys`.

use clap::{Args, Subcommand};

use super::OutputArgs;

#[derive(Debug, Subcommand)]
pub(crate) enum KeysCommand {
    /// Make a new key: prints it, and the line with its digest for the configuration.
    #[command(after_long_help = "Examples:\n  semmoe keys new team-a")]
    New(KeyName),
    /// Read a key from standard input and print the line with its digest.
    #[command(after_long_help = "Examples:\n  semmoe keys hash team-b < key.txt")]
    Hash(KeyName),
}

#[derive(Debug, Args)]
pub(crate) struct KeyName {
    /// Name of the key, as it will stand in logs.
    #[arg(default_value = "client")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}
