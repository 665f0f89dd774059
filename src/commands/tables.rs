//! `semmoe tables show|verify`, and the way to its other subcommands.

use std::fmt::Write;

use semmoe_tables::{Attention, LayerIdx, Tables};

use super::{export, permute, print};
use crate::args::{TablesCommand, TablesFile};
use crate::error::CliError;

pub(crate) fn run(command: &TablesCommand) -> Result<(), CliError> {
    match command {
        TablesCommand::Show(TablesFile { file }) => {
            let tables = Tables::open(file).map_err(CliError::input)?;
            print(&describe(&tables))
        }
        TablesCommand::Verify(TablesFile { file }) => {
            // Opening checks everything: a file that opens is right.
            let tables = Tables::open(file).map_err(CliError::input)?;
            print(&format!("{}: ok, digest {}", file.display(), tables.digest()))
        }
        TablesCommand::Export(args) => export::run(args),
        TablesCommand::Permute(args) => permute::run(args),
    }
}

fn describe(tables: &Tables) -> String {
    let model = tables.model();
    let attention = match tables.attention() {
        Attention::Dp => format!("dp, {} attention-DP ranks", tables.dp_ranks()),
        Attention::Tp => format!("tp, {} labels a token", tables.labels()),
    };
    let mut text = String::new();
    let mut line = |name: &str, value: &str| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name:<18} {value}");
    };
    line("model", &model.model);
    line("tokenizer", model.tokenizer_sha256.as_deref().unwrap_or("unknown"));
    line(
        "shape",
        &format!(
            "{} MoE layers of {}, {} experts, top-{}, vocabulary {}",
            model.layers(),
            model.num_hidden_layers,
            model.num_experts,
            model.top_k,
            model.vocab_size
        ),
    );
    line("attention", &attention);
    line("groups", &tables.groups().to_string());
    if let Some(replicas) = tables.physical_to_logical() {
        let (slots, groups) = (replicas.slots(), usize::from(tables.groups()));
        let empty = replicas.layer(LayerIdx::new(0)).iter().filter(|expert| **expert < 0).count();
        let redundant = (slots - empty).saturating_sub(usize::from(model.num_experts));
        let each = slots / groups.max(1);
        line("slots", &format!("{slots} a layer, {each} a group, {redundant} of them redundant, {empty} empty"));
    }
    line("prices", &format!("{:?}", tables.price()));
    line("solver", tables.solver());
    line("source", &tables.provenance().source);
    line("created", &tables.provenance().created);
    line("placement digest", tables.placement_digest());
    line("digest", tables.digest());
    text.truncate(text.trim_end().len());
    text
}
