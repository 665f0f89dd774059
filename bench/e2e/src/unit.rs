//! The rank processes of one configuration; dropping the value stops them.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use semmoe_engines::http::{AnswerLimits, BaseUrl, HttpClient};
use semmoe_worker::Ranks;
use tokio::process::Command;

use crate::counters::{Counters, Reading};
use crate::error::BenchError;
use crate::network::Network;

/// How long all ranks may take to come up.
const START: Duration = Duration::from_secs(120);

/// The ranks to start.
#[derive(Debug)]
pub struct UnitSpec<'a> {
    /// The program.
    pub semmoe: &'a Path,
    /// Checkpoint directory.
    pub model: &'a Path,
    /// Ranks of the unit.
    pub ranks: u16,
    /// Placement to run; contiguous without.
    pub tables: Option<&'a Path>,
    /// Further arguments of every rank; `{rank}` in them stands for its number.
    pub arguments: &'a [String],
    /// File with the secret that ranks prove to each other.
    pub secret: &'a Path,
}

/// Running ranks. Dropping asks them to stop; [`Unit::stop`] also waits for them.
#[derive(Debug)]
pub struct Unit {
    /// The URL of rank 0's HTTP server.
    pub url: BaseUrl,
    ranks: Ranks,
    client: HttpClient,
}

impl Unit {
    /// Starts rank 0, then the others, and waits until all are ready.
    ///
    /// # Errors
    /// A rank that does not start in time.
    pub async fn start(spec: &UnitSpec<'_>, network: &Network) -> Result<Self, BenchError> {
        let rendezvous = format!("{}:0", network.control(0));
        let ranks = Ranks::start(spec.ranks, &rendezvous, START, |rank| Ok(command(spec, network, rank))).await;
        let ranks = ranks.map_err(BenchError::failed)?;
        Ok(Self { url: ranks.url.parse().map_err(BenchError::failed)?, ranks, client: HttpClient::default() })
    }

    /// The current counters of all ranks and the CPU time of their processes.
    ///
    /// # Errors
    /// Metrics that cannot be fetched.
    pub async fn read(&self) -> Result<Reading, BenchError> {
        let limits = AnswerLimits::default();
        let page = self.client.get_text(&self.url, "/metrics", &limits).await.map_err(BenchError::failed)?;
        let cpu_seconds = self.ranks.pids().iter().map(|pid| cpu_seconds(*pid)).sum::<Result<f64, _>>()?;
        Ok(Reading { page, cpu_seconds })
    }

    /// The counts since a reading.
    ///
    /// # Errors
    /// Metrics that cannot be fetched or parsed.
    pub async fn counters(&self, since: &Reading) -> Result<Counters, BenchError> {
        let no_sample = |error| BenchError::failed(format!("{}/metrics has {error}", self.url));
        self.read().await?.since(since).map_err(no_sample)
    }

    /// Asks the ranks to stop and waits for them.
    ///
    /// # Errors
    /// A rank that does not exit.
    pub async fn stop(self) -> Result<(), BenchError> {
        let ranks = self.ranks.pids().len();
        if self.ranks.stop().await.len() < ranks {
            Err(BenchError::failed("ranks did not exit in time"))
        } else {
            Ok(())
        }
    }
}

/// Writes a secret for the ranks of this run.
///
/// # Errors
/// A file that exists already, or cannot be written.
pub fn write_secret(path: &Path) -> Result<(), BenchError> {
    const SOURCE: &str = "/dev/urandom";
    let mut bytes = [0u8; 24];
    fs::File::open(SOURCE)
        .and_then(|mut source| source.read_exact(&mut bytes))
        .map_err(BenchError::file(Path::new(SOURCE)))?;
    let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut options = fs::OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    options.open(path).and_then(|mut file| file.write_all(text.as_bytes())).map_err(BenchError::file(path))
}

fn command(spec: &UnitSpec<'_>, network: &Network, rank: u16) -> Command {
    let mut command = network.command(rank, spec.semmoe);
    command.arg("worker").arg("--model").arg(spec.model).arg("--secret-file").arg(spec.secret);
    if rank == 0 {
        command.args(["--listen", &format!("{}:0", network.control(0))]);
    }
    if let Some(address) = network.data(rank) {
        command.args(["--data-address", &address.to_string()]);
    }
    if let Some(tables) = spec.tables {
        command.arg("--tables").arg(tables);
    }
    command.args(spec.arguments.iter().map(|argument| argument.replace("{rank}", &rank.to_string())));
    command
}

/// User and system time of a process.
fn cpu_seconds(pid: u32) -> Result<f64, BenchError> {
    let path = PathBuf::from(format!("/proc/{pid}/stat"));
    let text = std::fs::read_to_string(&path).map_err(BenchError::file(&path))?;
    cpu_of_stat(&text).ok_or_else(|| BenchError::failed(format!("{} has no times", path.display())))
}

/// The process name may contain anything but ends at the last bracket. Ticks are hundredths of a second on Linux.
fn cpu_of_stat(text: &str) -> Option<f64> {
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some((ticks(11)? + ticks(12)?) as f64 / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_found_behind_any_name() {
        let line = "42 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 150 25 0 0 20 0\n";
        assert_eq!(cpu_of_stat(line), Some(1.75));
        assert_eq!(cpu_of_stat("42 (a) S 1"), None);
        assert_eq!(cpu_of_stat(""), None);
        assert!(cpu_seconds(std::process::id()).is_ok());
    }
}
