//! The rank processes of one unit: started, watched, and stopped only by this process.

use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use semmoe_tables::{Attention, Domains};
use semmoe_worker::{ExpertLayout, TransportChoice, WireType, WorkerEvent};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::args::{UnitAttention, UpArgs};
use crate::commands::plan::UnitPlan;
use crate::error::CliError;

/// Start-up limit for all ranks together.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for a rank to exit after it was asked to.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Time after a first death within which other ranks may still turn out to be the cause.
const BLAME_WINDOW: Duration = Duration::from_millis(300);
/// Exit code of a rank that left because a peer was lost.
const EXIT_PEER_LOST: i32 = 3;

/// The layout of a unit over its ranks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct UnitLayout {
    /// Number of ranks.
    pub(crate) ranks: u16,
    /// How attention is parallelized.
    pub(crate) attention: UnitAttention,
    /// How experts are divided.
    pub(crate) experts: ExpertLayout,
    /// Ranks that hold each other's experts.
    pub(crate) domains: Domains,
    /// Transport between ranks.
    pub(crate) transport: TransportChoice,
    /// Element type of the rows sent between ranks.
    pub(crate) wire: WireType,
    /// Slots per layer beyond one per expert, for replicas.
    pub(crate) redundant: u16,
}

impl UnitLayout {
    /// The planned layout, or that of the arguments.
    ///
    /// # Errors
    /// Arguments that contradict each other.
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
                "--check compares placements of experts, and with expert domains or attention groups there are none",
            ));
        }
        if args.check && experts != ExpertLayout::Ep {
            return Err(CliError::input(format!(
                "--check compares placements of experts, and with --experts {experts} there are none"
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

    /// The simplest layout with as many ranks, and the fastest to record with: the routing depends only on the model.
    pub(crate) fn to_record(self) -> Self {
        let attention = UnitAttention { attention: Attention::Dp, groups: 1, both: false, shuffle: true };
        let domains = Domains::NONE;
        Self { attention, experts: ExpertLayout::Ep, domains, wire: WireType::F32, redundant: 0, ..self }
    }

    /// Whether it can use tables.
    pub(crate) fn takes_tables(self) -> bool {
        self.experts == ExpertLayout::Ep && self.domains == Domains::NONE && self.attention.groups == 1
    }

    /// Number of ranks that a request can go to.
    pub(crate) fn replicas(self) -> u16 {
        match self.attention.attention {
            Attention::Dp => self.ranks,
            Attention::Tp => self.attention.groups,
        }
    }
}

/// The unit to start.
#[derive(Debug, Clone)]
pub(crate) struct UnitSpec {
    /// Checkpoint directory.
    pub(crate) model: PathBuf,
    /// Tables whose placement the unit runs; contiguous placement if absent.
    pub(crate) tables: Option<PathBuf>,
    pub(crate) layout: UnitLayout,
}

/// A running unit. Dropping it closes the ranks' standard input, whereupon they exit; [`Unit::stop`] also waits for
/// them.
#[derive(Debug)]
pub(crate) struct Unit {
    /// Base URL of the unit's HTTP server.
    pub(crate) url: String,
    stdins: Vec<ChildStdin>,
    deaths: mpsc::UnboundedReceiver<RankDeath>,
    alive: usize,
}

/// A rank process that ended.
#[derive(Debug)]
pub(crate) struct RankDeath {
    rank: u16,
    pid: u32,
    status: Option<ExitStatus>,
    last_words: Option<String>,
}

impl Unit {
    /// Starts rank 0, then the others once the rendezvous address is known, and waits until all are ready.
    pub(crate) async fn start(spec: &UnitSpec) -> Result<Self, CliError> {
        let (report, deaths) = mpsc::unbounded_channel();
        let mut unit = Self { url: String::new(), stdins: Vec::new(), deaths, alive: 0 };
        let started = timeout(START_TIMEOUT, unit.start_ranks(spec, report)).await;
        match started {
            Ok(result) => result.map(|()| unit),
            Err(_) => Err(CliError::failed(format!(
                "the {} ranks were not ready within {START_TIMEOUT:?}",
                spec.layout.ranks
            ))),
        }
    }

    async fn start_ranks(&mut self, spec: &UnitSpec, report: mpsc::UnboundedSender<RankDeath>) -> Result<(), CliError> {
        let mut front = self.spawn(spec, 0, "127.0.0.1:0", &report)?;
        let WorkerEvent::Bound { rendezvous } = self.next_event(&mut front).await? else {
            return Err(CliError::failed("rank 0 was ready before it had a rendezvous address"));
        };
        let mut outputs = vec![front];
        for rank in 1..spec.layout.ranks {
            outputs.push(self.spawn(spec, rank, &rendezvous.to_string(), &report)?);
        }
        for (rank, output) in outputs.iter_mut().enumerate() {
            match self.next_event(output).await? {
                WorkerEvent::Ready { http: Some(address), .. } if rank == 0 => self.url = format!("http://{address}"),
                WorkerEvent::Ready { .. } if rank != 0 => {}
                event => return Err(CliError::failed(format!("rank {rank} said {event:?} instead of being ready"))),
            }
        }
        // A rank prints nothing more; its pipe is drained anyway so that it can never block on it.
        for mut output in outputs {
            tokio::spawn(async move { while let Ok(Some(_)) = output.next_line().await {} });
        }
        Ok(())
    }

    fn spawn(
        &mut self,
        spec: &UnitSpec,
        rank: u16,
        rendezvous: &str,
        report: &mpsc::UnboundedSender<RankDeath>,
    ) -> Result<tokio::io::Lines<BufReader<ChildStdout>>, CliError> {
        let cannot = |error: std::io::Error| CliError::failed(format!("cannot start rank {rank}: {error}"));
        let layout = spec.layout;
        let mut command = Command::new(std::env::current_exe().map_err(cannot)?);
        command.arg("worker").arg("--model").arg(&spec.model);
        command.args(["--rank", &rank.to_string(), "--world", &layout.ranks.to_string()]);
        command.args(["--rendezvous", rendezvous, "--exit-on-stdin-eof"]);
        if rank == 0 {
            command.args(["--listen", "127.0.0.1:0"]);
        }
        if let Some(tables) = &spec.tables {
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
        // Its own process group: Ctrl-C reaches only this process, which then stops the ranks in order.
        command.process_group(0).kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(cannot)?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(CliError::failed(format!("rank {rank} has no pipes")));
        };
        self.stdins.push(stdin);
        self.alive += 1;
        tokio::spawn(watch(rank, child, report.clone()));
        Ok(BufReader::new(stdout).lines())
    }

    /// The next event of one rank, or the death of any.
    async fn next_event(
        &mut self,
        output: &mut tokio::io::Lines<BufReader<ChildStdout>>,
    ) -> Result<WorkerEvent, CliError> {
        let line = tokio::select! {
            biased;
            line = output.next_line() => line,
            death = self.died() => return Err(death.into_error()),
        };
        match line {
            Ok(Some(line)) => serde_json::from_str(&line)
                .map_err(|error| CliError::failed(format!("a rank printed {line:?}, which is no event: {error}"))),
            Ok(None) => Err(self.died().await.into_error()),
            Err(error) => Err(CliError::failed(format!("the output of a rank cannot be read: {error}"))),
        }
    }

    /// Resolves when a rank dies, with the one to blame: not one that left because a peer was lost.
    pub(crate) async fn died(&mut self) -> RankDeath {
        let Some(first) = self.deaths.recv().await else { return std::future::pending().await };
        self.alive -= 1;
        let mut blamed = first;
        while blamed.followed_a_peer()
            && let Ok(Some(next)) = timeout(BLAME_WINDOW, self.deaths.recv()).await
        {
            self.alive -= 1;
            blamed = next;
        }
        blamed
    }

    /// Asks every rank to exit, waits, and kills those that do not.
    pub(crate) async fn stop(mut self) {
        self.stdins.clear();
        let all_gone = async {
            while self.alive > 0 && self.deaths.recv().await.is_some() {
                self.alive -= 1;
            }
        };
        if timeout(STOP_TIMEOUT, all_gone).await.is_err() {
            tracing::warn!(ranks = self.alive, "ranks did not exit in time and are being killed");
        }
    }
}

impl RankDeath {
    fn followed_a_peer(&self) -> bool {
        self.status.and_then(|status| status.code()) == Some(EXIT_PEER_LOST)
    }

    /// The death as a failure of this command; a rank that rejected its input (exit code 2) is an input error here,
    /// too.
    pub(crate) fn into_error(self) -> CliError {
        match (self.status.and_then(|status| status.code()), &self.last_words) {
            (Some(2), Some(words)) => CliError::input(words.trim_start_matches("semmoe: ")),
            _ => CliError::failed(self),
        }
    }
}

impl std::fmt::Display for RankDeath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} (pid {}) died", self.rank, self.pid)?;
        if let Some(status) = self.status {
            write!(f, ": {status}")?;
        }
        match &self.last_words {
            Some(words) => write!(f, "; its last words: {words}"),
            None => Ok(()),
        }
    }
}

/// Owns one child until it ends. The task is cancelled with the runtime, which kills the child.
async fn watch(rank: u16, mut child: Child, report: mpsc::UnboundedSender<RankDeath>) {
    let pid = child.id().unwrap_or_default();
    let mut last_words = None;
    if let Some(stderr) = child.stderr.take() {
        let mut lines = BufReader::new(stderr).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            tracing::debug!(rank, "{line}");
            last_words = Some(line);
        }
    }
    let status = child.wait().await.ok();
    // The receiver exists as long as the unit.
    let _ = report.send(RankDeath { rank, pid, status, last_words });
}
