//! `semmoe tables show|verify`, and dispatch to the other `tables` subcommands.

use std::path::Path;

use semmoe_tables::{Attention, LayerIdx, ModelInfo, Provenance, Tables};
use serde::Serialize;

use super::profile::failure;
use super::{check_output, export, pages, permute, print_result};
use crate::args::{ShowTables, TablesCommand, TablesFile};
use crate::error::CliError;

pub(crate) fn run(command: &TablesCommand) -> Result<(), CliError> {
    match command {
        TablesCommand::Show(ShowTables { tables: TablesFile { file, output }, html }) => {
            let tables = Tables::open(file).map_err(CliError::input)?;
            if let Some(html) = html {
                check_output(html, [file])?;
                pages::tables(&tables, facts(&tables)).write(html).map_err(failure)?;
            }
            print_result(*output, "tables show", &Described::new(&tables), || text(&facts(&tables)))
        }
        TablesCommand::Verify(TablesFile { file, output }) => {
            // Opening a file validates it completely.
            let tables = Tables::open(file).map_err(CliError::input)?;
            let (path, digest) = (file.display(), tables.digest());
            print_result(*output, "tables verify", &Verified { file, digest }, || {
                format!("{path}: ok, digest {digest}")
            })
        }
        TablesCommand::Export(args) => export::run(args),
        TablesCommand::Permute(args) => permute::run(args),
    }
}

#[derive(Serialize)]
struct Verified<'a> {
    file: &'a Path,
    digest: &'a str,
}

#[derive(Serialize)]
struct Described<'a> {
    model: &'a ModelInfo,
    attention: String,
    groups: u16,
    dp_ranks: u16,
    slots: Slots,
    price: &'a [f32],
    sequence_price: &'a [f32],
    /// Measured on requests held out from the solve; null if there were none or the solver does not state the rate.
    promised_lar: Option<f64>,
    solver: &'a str,
    provenance: &'a Provenance,
    placement_digest: &'a str,
    digest: &'a str,
}

/// Slots per layer, over all groups.
#[derive(Clone, Copy, Serialize)]
pub(super) struct Slots {
    all: usize,
    redundant: usize,
    empty: usize,
}

impl Slots {
    pub(super) fn of(tables: &Tables) -> Self {
        let experts = usize::from(tables.model().num_experts);
        let Some(replicas) = tables.physical_to_logical() else { return Self { all: experts, redundant: 0, empty: 0 } };
        let empty = replicas.layer(LayerIdx::new(0)).iter().filter(|expert| **expert < 0).count();
        let all = replicas.slots();
        Self { all, redundant: (all - empty).saturating_sub(experts), empty }
    }

    /// Returns the `solve` arguments that produce tables of this shape.
    pub(super) fn solve_arguments(self, tables: &Tables) -> String {
        let redundant = if self.redundant > 0 { format!(" --redundant {}", self.redundant) } else { String::new() };
        let pad = if self.empty > 0 { " --pad" } else { "" };
        let attention = if tables.attention() == Attention::Tp { " --attention tp" } else { "" };
        format!("--groups {}{redundant}{pad}{attention}", tables.groups())
    }
}

impl<'a> Described<'a> {
    fn new(tables: &'a Tables) -> Self {
        Self {
            model: tables.model(),
            attention: tables.attention().to_string(),
            groups: tables.groups(),
            dp_ranks: tables.dp_ranks(),
            slots: Slots::of(tables),
            price: tables.price(),
            sequence_price: tables.sequence_price(),
            promised_lar: tables.promised_lar(),
            solver: tables.solver(),
            provenance: tables.provenance(),
            placement_digest: tables.placement_digest(),
            digest: tables.digest(),
        }
    }
}

/// Names and values, for display.
fn facts(tables: &Tables) -> Vec<(&'static str, String)> {
    let model = tables.model();
    let attention = match tables.attention() {
        Attention::Dp => format!("dp, {} attention-DP ranks", tables.dp_ranks()),
        Attention::Tp => format!("tp, {} labels per token", tables.labels()),
    };
    let shape = format!(
        "{} MoE layers of {}, {} experts, top-{}, vocabulary {}",
        model.layers(),
        model.num_hidden_layers,
        model.num_experts,
        model.top_k,
        model.vocab_size
    );
    let promised =
        tables.promised_lar().map(|lar| format!("{lar:.4} of activations local, on requests held out from the solve"));
    let mut facts = vec![
        ("model", model.model.clone()),
        ("tokenizer", model.tokenizer_sha256.clone().unwrap_or_else(|| "unknown".to_owned())),
        ("shape", shape),
        ("attention", attention),
        ("groups", tables.groups().to_string()),
    ];
    if tables.physical_to_logical().is_some() {
        let Slots { all, redundant, empty } = Slots::of(tables);
        let each = all / usize::from(tables.groups()).max(1);
        facts.push((
            "slots",
            format!("{all} per layer, {each} per group, {redundant} of them redundant, {empty} empty"),
        ));
    }
    facts.extend([
        ("prices", format!("{:?}", tables.price())),
        ("prices of sequences", format!("{:?}", tables.sequence_price())),
        ("promise", promised.unwrap_or_else(|| "unknown: no requests were held out".to_owned())),
        ("solver", tables.solver().to_owned()),
        ("source", tables.provenance().source.clone()),
        ("created", tables.provenance().created.clone()),
        ("placement digest", tables.placement_digest().to_owned()),
        ("digest", tables.digest().to_owned()),
    ]);
    facts
}

fn text(facts: &[(&str, String)]) -> String {
    facts.iter().map(|(name, value)| format!("{name:<18} {value}\n")).collect()
}
