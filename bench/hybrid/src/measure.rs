//! Units on their links: started together, loaded one at a time.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use semmoe_bench_e2e::error::BenchError;
use semmoe_bench_e2e::network::Network;
use semmoe_bench_e2e::unit::{Unit, UnitSpec};
use semmoe_load::{Limit, LoadOptions, Pace};
use tokio::time::sleep;

use crate::args::Args;
use crate::layouts::{Layout, WIDTH};

/// Concurrent requests per rank: enough to fill every step.
const CLIENTS: usize = 12;
/// Warm-up before a block is measured.
const RAMP: Duration = Duration::from_secs(1);

/// One layout under load over links of one ratio.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub(crate) layout: Layout,
    /// Inner over outer bandwidth; `None` if links inside nodes are unlimited.
    pub(crate) ratio: Option<f64>,
    /// Tokens per second of the unit.
    pub(crate) throughput: f64,
    /// Bytes of dispatch and combine per token, between nodes and inside them.
    pub(crate) other_bytes: f64,
    pub(crate) node_bytes: f64,
    /// By the clock of the ranks' stages.
    pub(crate) time: std::ops::Range<u64>,
}

/// The nodes of a unit and the carrier between its ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Nodes {
    pub(crate) nodes: u16,
    /// As in `semmoe worker --transport`.
    pub(crate) transport: &'static str,
}

/// A running layout.
pub(crate) struct Contestant {
    pub(crate) layout: Layout,
    /// Concurrent requests.
    concurrency: usize,
    unit: Unit,
    logs: Vec<PathBuf>,
}

impl Contestant {
    pub(crate) async fn start(
        args: &Args,
        network: &Network,
        folder: &Path,
        layout: Layout,
        Nodes { nodes, transport }: Nodes,
    ) -> Result<Self, BenchError> {
        let ranks = nodes * WIDTH;
        let logs: Vec<PathBuf> =
            (0..ranks).map(|rank| folder.join(format!("{transport} {nodes} {}.{rank}.jsonl", layout.name()))).collect();
        let pattern = folder.join(format!("{transport} {nodes} {}.{{rank}}.jsonl", layout.name()));
        let fixed = ["--max-running", "64", "--kv-tokens", "16384", "--no-prefix-reuse", "--transport", transport];
        let mut arguments: Vec<String> = fixed.map(str::to_owned).to_vec();
        arguments.extend(["--nodes".to_owned(), nodes.to_string()]);
        arguments.extend(["--step-tokens".to_owned(), args.step_tokens.to_string()]);
        arguments.extend(["--stages".to_owned(), pattern.display().to_string()]);
        arguments.extend(layout.arguments());
        let secret = folder.join("secret");
        let spec = UnitSpec {
            semmoe: &args.semmoe,
            model: &args.model,
            ranks,
            tables: None,
            arguments: &arguments,
            secret: &secret,
        };
        let concurrency = CLIENTS * usize::from(ranks);
        Ok(Self { layout, concurrency, unit: Unit::start(&spec, network).await?, logs })
    }

    /// Loads the unit with enough requests to fill every step.
    pub(crate) async fn load(&self, args: &Args, ratio: Option<f64>) -> Result<Block, BenchError> {
        let length = Duration::from_secs_f64(args.seconds);
        let pace = Pace::Closed { concurrency: self.concurrency };
        let options = LoadOptions {
            max_tokens: 1,
            timeout: Duration::from_secs(120),
            threads: Some(1),
            ..LoadOptions::new(self.unit.url.clone(), args.prompts.clone(), pace, Limit::Duration(RAMP + length))
        };
        let window = async {
            sleep(RAMP).await;
            let (before, began) = (self.unit.read().await?, now());
            sleep(length).await;
            let (counted, ended) = (self.unit.counters(&before).await?, now());
            Ok::<_, BenchError>((counted, began..ended))
        };
        let load =
            async { semmoe_load::run(options, &|_| {}, std::future::pending()).await.map_err(BenchError::failed) };
        let (report, window) = tokio::join!(load, window);
        let (report, (counted, time)) = (report?, window?);
        if let Some(error) = report.errors.first() {
            return Err(BenchError::failed(format!("{}: a request failed: {}", self.layout.name(), error.kind)));
        }
        let seconds = (time.end - time.start) as f64 * 1e-9;
        let per_token = |bytes: f64| bytes / counted.tokens.max(1.0);
        Ok(Block {
            layout: self.layout,
            ratio,
            throughput: counted.tokens / seconds,
            other_bytes: per_token(counted.other_bytes),
            node_bytes: per_token(counted.node_bytes),
            time,
        })
    }

    /// Stops the ranks; returns the paths of their stage logs.
    pub(crate) async fn stop(self) -> Result<(Layout, Vec<PathBuf>), BenchError> {
        self.unit.stop().await?;
        Ok((self.layout, self.logs))
    }
}

/// The clock that `semmoe worker --stages` uses.
fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
