//! The layout of the unit that `up` runs, and starting its ranks.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use semmoe_tables::{Attention, Domains};
use semmoe_worker::{ExpertLayout, LaunchError, RankDeath, Ranks, TransportChoice, WireType};
use tokio::process::Command;

use crate::args::{UnitAttention, UpArgs};
use crate::commands::plan::UnitPlan;
use crate::error::CliError;

/// Startup timeout for all ranks together.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A unit's layout over its ranks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct UnitLayout {
    /// Number of ranks.
    pub(crate) ranks: u16,
    /// How attention is parallelized.
    pub(crate) attention: UnitAttention,
    /// How experts are divided among ranks.
    pub(crate) experts: ExpertLayout,
    /// Expert domains: sets of ranks that hold each other's experts.
    pub(crate) domains: Domains,
    /// Transport between ranks.
    pub(crate) transport: TransportChoice,
    /// Element type of the rows sent between ranks.
    pub(crate) wire: WireType,
    /// Replica slots per layer, in addition to one per expert.
    pub(crate) redundant: u16,
}

impl UnitLayout {
    /// Returns the planned layout, otherwise the layout given by the arguments.
    ///
    /// # Errors
    /// If arguments contradict each other.
    pub(crate) fn of(args: &UpArgs, planned: Option<UnitPlan>) -> Result<Self, CliError> {
        let mut attention = args.attention.read()?;
        let given = UnitPlan {
            ranks: args.ranks,
            attention: attention.attention,
            attention_groups: attention.groups,
            experts: args.layout.experts,
            domains: Domains::NONE,
            wire: args.layout.wire.unwrap_or_default(),
        };
        let unit = planned.unwrap_or(given);
        let UnitPlan { ranks, experts, domains, wire, .. } = unit;
        (attention.attention, attention.groups) = (unit.attention, unit.attention_groups);
        if args.check && (domains != Domains::NONE || attention.groups > 1) {
            return Err(CliError::input(
                "--check compares expert placements, and there are none with expert domains or attention groups",
            ));
        }
        if args.check && experts != ExpertLayout::Ep {
            return Err(CliError::input(format!(
                "--check compares expert placements, and there are none with --experts {experts}"
            )));
        }
        let no_replicas = match (experts, attention.attention) {
            _ if args.redundant == 0 => None,
            _ if domains != Domains::NONE => Some("expert domains, which place every expert"),
            (ExpertLayout::Tp, _) => Some("--experts tp, where every rank has a slice of every expert"),
            (ExpertLayout::Hybrid(_), _) => Some("--experts hybrid, where experts belong to nodes"),
            (_, Attention::Tp) => Some("--attention tp, where the rank of a row depends on the batch"),
            _ => None,
        };
        if let Some(other) = no_replicas {
            return Err(CliError::input(format!("--redundant {} cannot be combined with {other}", args.redundant)));
        }
        let (transport, redundant) = (args.layout.transport, args.redundant);
        Ok(Self { ranks, attention, experts, domains, transport, wire, redundant })
    }

    /// Returns the simplest layout with the same number of ranks, which records fastest. Routing depends only on the
    /// model.
    pub(crate) fn to_record(self) -> Self {
        let attention = UnitAttention { attention: Attention::Dp, groups: 1, both: false, shuffle: true };
        let domains = Domains::NONE;
        Self { attention, experts: ExpertLayout::Ep, domains, wire: WireType::F32, redundant: 0, ..self }
    }

    /// Whether the layout can use tables.
    pub(crate) fn takes_tables(self) -> bool {
        self.experts == ExpertLayout::Ep && self.domains == Domains::NONE && self.attention.groups == 1
    }

    /// Number of ranks that a request can be routed to.
    pub(crate) fn replicas(self) -> u16 {
        match self.attention.attention {
            Attention::Dp => self.ranks,
            Attention::Tp => self.attention.groups,
        }
    }
}

/// Specification of a unit to start.
#[derive(Debug, Clone)]
pub(crate) struct UnitSpec {
    /// Checkpoint directory.
    pub(crate) model: PathBuf,
    /// Tables whose placement the unit runs; contiguous placement if absent.
    pub(crate) tables: Option<PathBuf>,
    pub(crate) layout: UnitLayout,
}

impl UnitSpec {
    /// Starts all ranks and waits until they are ready.
    pub(crate) async fn start(&self) -> Result<Ranks, CliError> {
        let started = Ranks::start(self.layout.ranks, "127.0.0.1:0", START_TIMEOUT, |rank| self.command(rank)).await;
        started.map_err(|error| match error {
            LaunchError::Died(death) => failure(death),
            error => CliError::failed(error),
        })
    }

    fn command(&self, rank: u16) -> io::Result<Command> {
        let layout = self.layout;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("worker").arg("--model").arg(&self.model);
        if rank == 0 {
            command.args(["--listen", "127.0.0.1:0"]);
        }
        if let Some(tables) = &self.tables {
            command.arg("--tables").arg(tables);
        }
        command.args(["--experts", &layout.experts.to_string(), "--transport", &layout.transport.to_string()]);
        command.args(["--wire", &layout.wire.to_string(), "--domains", &layout.domains.to_string()]);
        let UnitAttention { attention, groups, both, shuffle } = layout.attention;
        command.arg("--attention").arg(match (attention, both) {
            (Attention::Dp, false) => "dp",
            (Attention::Dp, true) => "dp,tp",
            (Attention::Tp, false) => "tp",
            (Attention::Tp, true) => "tp,dp",
        });
        if attention == Attention::Tp || both {
            command.args(["--shuffle", if shuffle { "auto" } else { "off" }]);
        }
        command.args(["--attention-groups", &groups.to_string()]);
        Ok(command)
    }
}

/// Converts a rank's death to this command's error; if the rank rejected its input (exit code 2), it is an input error
/// here too.
pub(crate) fn failure(death: RankDeath) -> CliError {
    match (death.exit_code(), &death.last_words) {
        (Some(2), Some(words)) => CliError::input(words.trim_start_matches("semmoe: ")),
        _ => CliError::failed(death),
    }
}
