//! Parts of the gateway's benchmark, started by `bench/gateway/run`: a mock engine, a client that checks every answer,
//! and tables of realistic size. README.md has the figures and the command.

mod answer;
mod canned;
mod client;
mod error;
mod mock;
mod poller;
mod prompts;
mod tables;

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use crate::client::{Arrivals, Plan};
use crate::error::BenchError;
use crate::mock::Mock;

/// Parts of the gateway's benchmark; `bench/gateway/run` runs all of it.
#[derive(Debug, Parser)]
#[command(name = "semmoe-bench-gateway")]
enum Cli {
    /// A mock engine; exits when its standard input closes.
    Mock {
        /// Attention-DP ranks that it reports.
        #[arg(long, default_value_t = 8)]
        ranks: u16,
    },
    /// Writes tables with made-up shares.
    Tables {
        /// `tokenizer.json`.
        #[arg(long, value_name = "FILE")]
        tokenizer: PathBuf,
        /// Vocabulary size, at least the tokenizer's.
        #[arg(long, default_value_t = 151_936)]
        vocab: u32,
        /// Ranks.
        #[arg(long, default_value_t = 8)]
        ranks: u16,
        /// Seed of the shares.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// The file to write.
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
    },
    /// Sends requests, checks every answer, prints figures as JSON.
    Client(ClientArgs),
}

#[derive(Debug, Args)]
struct ClientArgs {
    /// The target.
    #[arg(long, value_name = "ADDRESS")]
    target: SocketAddr,
    /// JSONL files with "prompt" or "messages"; by default the bundled ones.
    #[arg(long, value_name = "FILE")]
    prompts: Vec<PathBuf>,
    /// Number of different prompts.
    #[arg(long, default_value_t = 200)]
    count: usize,
    /// Words per prompt.
    #[arg(long, default_value_t = 700)]
    words: usize,
    #[command(subcommand)]
    kind: ArrivalArgs,
    /// Request streams of 64 events.
    #[arg(long)]
    stream: bool,
    /// Number each prompt, so that no two are equal.
    #[arg(long)]
    fresh: bool,
    /// Warm-up in seconds.
    #[arg(long, default_value_t = 0.5)]
    warm_up_seconds: f64,
    /// Measured time in seconds.
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Stop early after this many requests.
    #[arg(long, default_value_t = u64::MAX)]
    requests: u64,
}

#[derive(Clone, Copy, Debug, Subcommand)]
enum ArrivalArgs {
    /// Closed loop: each connection sends when its previous answer is complete.
    Closed {
        /// Connections.
        connections: usize,
    },
    /// Open loop: random arrivals, independent of answers.
    Open {
        /// Requests per second.
        per_second: f64,
    },
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Ignore a closed pipe.
            let _ = writeln!(std::io::stderr(), "{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<(), BenchError> {
    match cli {
        Cli::Mock { ranks } => mock(ranks),
        Cli::Tables { tokenizer, vocab, ranks, seed, out } => tables::write(&tokenizer, vocab, ranks, seed, &out),
        Cli::Client(args) => client(&args),
    }
}

fn mock(ranks: u16) -> Result<(), BenchError> {
    let fail = BenchError::io("listen");
    let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(&fail)?;
    let address = listener.local_addr().map_err(&fail)?;
    let mut mock = Mock::new(listener, ranks)?;
    print(&address.to_string());
    // The parent holds this standard input open; the mock exits with it.
    let input = std::thread::spawn(|| std::io::copy(&mut std::io::stdin(), &mut std::io::sink()));
    mock.run(|| input.is_finished())
}

fn client(args: &ClientArgs) -> Result<(), BenchError> {
    let files = if args.prompts.is_empty() { prompts::bundled() } else { args.prompts.clone() };
    let host = args.target.to_string();
    let texts = prompts::prompts(&files, args.count, args.words)?;
    let plan = Plan {
        target: args.target,
        requests: texts.iter().map(|text| prompts::request(&host, text, args.stream)).collect(),
        expected: if args.stream { canned::events().concat() } else { canned::chat() },
        arrivals: match args.kind {
            ArrivalArgs::Closed { connections } => Arrivals::Closed { connections },
            ArrivalArgs::Open { per_second } => Arrivals::Open { per_second, seed: 1 },
        },
        fresh: args.fresh,
        warm_up: Duration::from_secs_f64(args.warm_up_seconds.clamp(0.0, 1e6)),
        duration: Duration::from_secs_f64(args.seconds.clamp(0.0, 1e6)),
        most_requests: args.requests,
    };
    let figures = client::run(&plan)?;
    print(&serde_json::to_string(&figures).unwrap_or_default());
    Ok(())
}

fn print(line: &str) {
    // Ignore a closed pipe.
    let _ = writeln!(std::io::stdout(), "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Measures the client against the mock without a gateway, the baseline for the gateways.
    fn measured(stream: bool, single: bool, arrivals: Arrivals) -> client::Figures {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let target = listener.local_addr().unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let stop = &stop;
            let engine = scope.spawn(move || Mock::new(listener, 8)?.run(|| stop.load(Ordering::SeqCst)));
            if single {
                let mut socket = std::net::TcpStream::connect(target).unwrap();
                socket.write_all(b"POST /bench/single HTTP/1.1\r\n\r\n").unwrap();
                let mut answer = [0; 8];
                std::io::Read::read_exact(&mut socket, &mut answer).unwrap();
            }
            let plan = Plan {
                target,
                requests: vec![prompts::request("x", "one two", stream), prompts::request("x", "three", stream)],
                expected: if stream { canned::events().concat() } else { canned::chat() },
                arrivals,
                fresh: true,
                warm_up: Duration::ZERO,
                duration: Duration::from_secs(60),
                most_requests: 50,
            };
            let figures = client::run(&plan);
            stop.store(true, Ordering::SeqCst);
            engine.join().unwrap().unwrap();
            figures.unwrap()
        })
    }

    #[test]
    fn every_kind_of_request_is_answered_as_expected() {
        for arrivals in [Arrivals::Closed { connections: 3 }, Arrivals::Open { per_second: 1e4, seed: 1 }] {
            for (stream, single) in [(false, false), (true, false), (true, true)] {
                let figures = measured(stream, single, arrivals);
                assert_eq!(figures.requests, figures.measured_requests);
                assert_eq!(figures.requests, 50);
                assert!(figures.p50_us > 0.0 && figures.p50_us <= figures.p99_us);
            }
        }
    }
}
