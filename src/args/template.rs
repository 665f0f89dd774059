//! Arguments of `semmoe template`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::OutputArgs;

const CHECK_EXAMPLES: &str = "\
Examples:
  semmoe template check Qwen3-30B-A3B
  semmoe template check Qwen3-30B-A3B --chats chats.jsonl --json
  semmoe template check Qwen3-30B-A3B --engine vllm@0.32.0";

#[derive(Debug, Subcommand)]
pub(crate) enum TemplateCommand {
    /// Render chats with a model's chat template and compare them with Jinja2.
    ///
    /// Prints each chat's token count, or why it was rejected, and the language features that the template uses. If
    /// python3 has the jinja2 package, rendered texts are compared with Jinja2 as configured by Transformers; any
    /// difference is a failure.
    #[command(after_long_help = CHECK_EXAMPLES)]
    Check(TemplateCheckArgs),
}

#[derive(Debug, Args)]
pub(crate) struct TemplateCheckArgs {
    /// The model's directory, with tokenizer.json and the chat template.
    #[arg(value_name = "TOKENIZER_DIR")]
    pub(crate) tokenizer: PathBuf,
    /// Chats or completions, one request body per line [default: a built-in set that covers all shapes].
    #[arg(long, value_name = "FILE")]
    pub(crate) chats: Option<PathBuf>,
    /// Prepare chats as this engine does: vllm, sglang or semmoe, with @VERSION for versions other than the newest.
    /// This disables the comparison with Jinja2 and uses today's date.
    #[arg(long, value_name = "ENGINE")]
    pub(crate) engine: Option<String>,
    /// Default template variables as a JSON object; chats can override them.
    #[arg(long, value_name = "JSON")]
    pub(crate) default_chat_template_kwargs: Option<String>,
    /// With --json, include each chat's token ids.
    #[arg(long)]
    pub(crate) ids: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}
