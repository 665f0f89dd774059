//! The arguments of `semmoe profile show`.

use std::path::PathBuf;

use clap::Args;

use super::OutputArgs;

#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// A trace or a profile.
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Another trace or profile of the same model to evaluate the predictions on [default: half of the file itself].
    #[arg(long, value_name = "FILE")]
    pub(crate) held_out: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    /// Also write a self-contained HTML page with charts.
    #[arg(long, help_heading = "Output", value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// With --html: tables whose local activation rate is shown, and whose groups order the map of tokens and experts.
    /// If repeated, the first orders the map.
    #[arg(long, help_heading = "With --html", value_name = "FILE", requires = "html")]
    pub(crate) tables: Vec<PathBuf>,
    /// With --html: solve for these group counts (quickly, from two starts) and show their local activation rates.
    #[arg(long, help_heading = "With --html", value_name = "G,G,...", value_delimiter = ',', requires = "html")]
    pub(crate) groups: Vec<u16>,
    /// With --html: the model's tokenizer or the checkpoint's directory, to show tokens as text.
    #[arg(long, help_heading = "With --html", value_name = "PATH", requires = "html")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// With --html and a trace: JSON Lines, where line r has the "domain" (or "topic") of request r.
    #[arg(long, help_heading = "With --html", value_name = "FILE", requires = "html")]
    pub(crate) topics: Option<PathBuf>,
    /// With --html: the model layer that the maps show [default: the middle MoE layer].
    #[arg(long, help_heading = "With --html", value_name = "ID", requires = "html")]
    pub(crate) layer: Option<u16>,
}
