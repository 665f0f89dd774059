//! Starts, monitors and stops the ranks of a unit as child processes.

use std::fmt;
use std::io;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::time::timeout;

use crate::rank::WorkerEvent;

/// Time limit for ranks to exit after a stop request.
const STOP_TIMEOUT: Duration = Duration::from_secs(15);
/// How long after the first death another rank may still turn out to be the cause.
const BLAME_WINDOW: Duration = Duration::from_millis(300);
/// Exit code of a rank that exited because it lost a peer.
const EXIT_PEER_LOST: i32 = 3;

/// Running ranks. Dropping them closes their standard input, which makes them exit; [`Ranks::stop`] also waits for
/// them.
#[derive(Debug)]
pub struct Ranks {
    /// Base URL of rank 0's HTTP server.
    pub url: String,
    pids: Vec<u32>,
    stdins: Vec<ChildStdin>,
    report: UnboundedSender<RankDeath>,
    deaths: UnboundedReceiver<RankDeath>,
    alive: usize,
}

/// Reasons why ranks did not start.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The ranks were not ready in time.
    #[error("the {0} ranks were not ready within {1:?}")]
    TooLate(u16, Duration),
    /// A rank's process could not be started.
    #[error("cannot start rank {0}: {1}")]
    Start(u16, io::Error),
    /// A rank printed something other than the expected event.
    #[error("rank {0} printed {1:?}, expected the event `{2}`")]
    Output(u16, String, &'static str),
    /// A process ended.
    #[error("{0}")]
    Died(RankDeath),
}

type Output = Lines<BufReader<ChildStdout>>;

impl Ranks {
    /// Starts rank 0, then the other ranks once the rendezvous address is known, and waits until all are ready.
    /// `command` builds `semmoe worker` with all of a rank's arguments except its rank, the world size and the
    /// rendezvous, which rank 0 binds at `rendezvous`.
    ///
    /// # Errors
    /// A rank does not start, exits, or is not ready within `limit`.
    pub async fn start(
        ranks: u16,
        rendezvous: &str,
        limit: Duration,
        command: impl Fn(u16) -> io::Result<Command>,
    ) -> Result<Self, LaunchError> {
        let (report, deaths) = mpsc::unbounded_channel();
        let mut all = Self { url: String::new(), pids: Vec::new(), stdins: Vec::new(), report, deaths, alive: 0 };
        let spawn = |all: &mut Self, rank: u16, rendezvous: &str| {
            let mut command = command(rank).map_err(|error| LaunchError::Start(rank, error))?;
            command.args(["--rank", &rank.to_string(), "--world", &ranks.to_string(), "--rendezvous", rendezvous]);
            all.spawn(rank, command).map_err(|error| LaunchError::Start(rank, error))
        };
        let starting = async {
            let mut front = spawn(&mut all, 0, rendezvous)?;
            let rendezvous = match all.event(0, &mut front, "bound").await? {
                WorkerEvent::Bound { rendezvous } => rendezvous.to_string(),
                event => return Err(LaunchError::Output(0, format!("{event:?}"), "bound")),
            };
            let mut outputs = vec![front];
            for rank in 1..ranks {
                outputs.push(spawn(&mut all, rank, &rendezvous)?);
            }
            for (rank, mut output) in (0..).zip(outputs) {
                match all.event(rank, &mut output, "ready").await? {
                    WorkerEvent::Ready { http: Some(address), .. } if rank == 0 => {
                        all.url = format!("http://{address}")
                    }
                    WorkerEvent::Ready { .. } if rank > 0 => {}
                    event => return Err(LaunchError::Output(rank, format!("{event:?}"), "ready")),
                }
                // A rank prints no further events; its pipe is drained so that it can never block.
                tokio::spawn(async move { while let Ok(Some(_)) = output.next_line().await {} });
            }
            Ok(())
        };
        timeout(limit, starting).await.unwrap_or(Err(LaunchError::TooLate(ranks, limit)))?;
        Ok(all)
    }

    fn spawn(&mut self, rank: u16, mut command: Command) -> io::Result<Output> {
        // In a separate process group, so that Ctrl-C reaches only this process, which then stops the ranks cleanly.
        command.arg("--exit-on-stdin-eof").process_group(0).kill_on_drop(true);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("it has no pipes"));
        };
        self.stdins.push(stdin);
        self.pids.push(child.id().unwrap_or_default());
        self.alive += 1;
        tokio::spawn(watch(rank, child, self.report.clone()));
        Ok(BufReader::new(stdout).lines())
    }

    /// Waits for one rank's next event, or for the death of any rank.
    async fn event(
        &mut self,
        rank: u16,
        output: &mut Output,
        expected: &'static str,
    ) -> Result<WorkerEvent, LaunchError> {
        let line = tokio::select! {
            biased;
            line = output.next_line() => line,
            death = self.died() => return Err(LaunchError::Died(death)),
        };
        match line {
            Ok(Some(line)) => serde_json::from_str(&line).map_err(|_| LaunchError::Output(rank, line, expected)),
            Ok(None) => Err(LaunchError::Died(self.died().await)),
            Err(error) => Err(LaunchError::Output(rank, error.to_string(), expected)),
        }
    }

    /// The process id of each rank.
    pub fn pids(&self) -> &[u32] {
        &self.pids
    }

    /// Resolves when a rank dies, with the rank to blame: not one that exited because it lost a peer.
    pub async fn died(&mut self) -> RankDeath {
        let Some(mut blamed) = self.deaths.recv().await else { return std::future::pending().await };
        self.alive -= 1;
        while blamed.exit_code() == Some(EXIT_PEER_LOST)
            && let Ok(Some(next)) = timeout(BLAME_WINDOW, self.deaths.recv()).await
        {
            self.alive -= 1;
            blamed = next;
        }
        blamed
    }

    /// Asks every rank to exit, waits for the live ranks, and kills those that do not exit in time. Returns the exit of
    /// every rank that did.
    pub async fn stop(mut self) -> Vec<RankDeath> {
        self.stdins.clear();
        let mut left = Vec::new();
        let all_gone = async {
            while left.len() < self.alive
                && let Some(death) = self.deaths.recv().await
            {
                left.push(death);
            }
        };
        if timeout(STOP_TIMEOUT, all_gone).await.is_err() {
            tracing::warn!(ranks = self.alive - left.len(), "killing ranks that did not exit in time");
        }
        left
    }
}

/// The end of a rank's process.
#[derive(Debug)]
pub struct RankDeath {
    /// The rank.
    pub rank: u16,
    pid: u32,
    status: Option<ExitStatus>,
    /// The rank's last line on standard error.
    pub last_words: Option<String>,
}

impl RankDeath {
    /// Returns the exit code; `None` for a killed process.
    pub fn exit_code(&self) -> Option<i32> {
        self.status.and_then(|status| status.code())
    }
}

impl fmt::Display for RankDeath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (pid {}) died", self.rank, self.pid)?;
        if let Some(status) = self.status {
            write!(f, ": {status}")?;
        }
        match &self.last_words {
            Some(words) => write!(f, "; last output: {words}"),
            None => Ok(()),
        }
    }
}

/// Owns one child process until it exits. When the runtime ends, the task is cancelled, which kills the child.
async fn watch(rank: u16, mut child: Child, report: UnboundedSender<RankDeath>) {
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
