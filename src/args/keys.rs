//! Arguments of `semmoe keys`.

use clap::{Args, Subcommand};

use super::OutputArgs;

#[derive(Debug, Subcommand)]
pub(crate) enum KeysCommand {
    /// Generate a key and print it, along with the configuration line that contains its digest.
    #[command(after_long_help = "Examples:\n  semmoe keys new team-a")]
    New(KeyName),
    /// Read a key from standard input and print the configuration line that contains its digest.
    #[command(after_long_help = "Examples:\n  semmoe keys hash team-b < key.txt")]
    Hash(KeyName),
}

#[derive(Debug, Args)]
pub(crate) struct KeyName {
    /// Name of the key, as shown in logs.
    #[arg(default_value = "client")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}
