//! `semmoe load`.

use semmoe_engines::tls::ClientFiles;
use semmoe_load::{Limit, LoadError, LoadOptions, Pace, Slo, Snapshot, bearer, parse_header};
use serde_json::{Map, Value};

use super::{check_inputs, print_result, server_url};
use crate::args::LoadArgs;
use crate::error::CliError;
use crate::progress::say;
use crate::signals::{Stops, block_on};
use view::View;

mod view;

pub(crate) fn run(args: LoadArgs) -> Result<(), CliError> {
    let (output, max_errors) = (args.output, args.max_errors);
    if let Some(share) = max_errors.filter(|share| !(0.0..=1.0).contains(share)) {
        return Err(CliError::input(format!("--max-errors is {share}, expected a fraction from 0 to 1")));
    }
    let (second, rounds) = (args.compare.clone(), args.rounds);
    let options = options(args)?;
    let second = second.as_deref().map(server_url).transpose()?;
    let view = View::start();
    let Some(second) = second else {
        let report = block_on(async {
            semmoe_load::run(options, &|snapshot| view.show(snapshot), first_stop()).await.map_err(failure)
        });
        view.finish();
        let report = report?;
        print_result(output, "load", &report, || report.to_string())?;
        return verdict(report.stopped, [(report.requests.ok, report.requests.failed)], max_errors);
    };
    let compared = block_on(async {
        let show = |snapshot: &Snapshot| view.show(snapshot);
        semmoe_load::compare(options, second, rounds, &show, first_stop()).await.map_err(failure)
    });
    view.finish();
    let compared = compared?;
    print_result(output, "load", &compared, || compared.to_string())?;
    verdict(compared.stopped, compared.ok_and_failed(), max_errors)
}

fn options(args: LoadArgs) -> Result<LoadOptions, CliError> {
    let url = server_url(&args.url)?;
    check_inputs([&args.prompts].into_iter().chain(&args.arrivals))?;
    let pace = match (args.concurrency, args.rate, args.arrivals) {
        (Some(concurrency), ..) => Pace::Closed { concurrency },
        (_, Some(per_second), _) => Pace::Poisson { per_second, seed: args.seed },
        (.., Some(arrivals)) => Pace::Recorded { arrivals, speed: args.speed },
        (None, None, None) => return Err(CliError::input("expected one of --concurrency, --rate and --arrivals")),
    };
    let limit = match (args.requests, args.duration) {
        (Some(requests), _) => Limit::Requests(requests),
        (None, Some(time)) => Limit::Duration(time),
        (None, None) if matches!(pace, Pace::Recorded { .. }) => Limit::Arrivals,
        (None, None) => return Err(CliError::input("the run would never end: pass --requests N or --duration 60s")),
    };
    let mut options = LoadOptions {
        api: args.route,
        tls: ClientFiles { ca: args.ca, cert: args.cert, key: args.key, server_name: None },
        stream: args.stream,
        model: args.model,
        max_tokens: args.max_tokens,
        extra: args.body.as_deref().map_or(Ok(Map::new()), fields)?,
        warmup: args.warmup,
        timeout: args.timeout,
        slo: Slo { ttft_ms: args.slo_ttft_ms, itl_ms: args.slo_itl_ms, e2e_ms: args.slo_e2e_ms },
        threads: args.threads,
        max_in_flight: args.max_in_flight,
        ..LoadOptions::new(url, args.prompts, pace, limit)
    };
    for header in &args.header {
        options.headers.extend([parse_header(header).map_err(CliError::input)?]);
    }
    if let Some(variable) = args.api_key_env {
        let key = std::env::var(&variable)
            .map_err(|_| CliError::input(format!("the environment variable {variable} is not set, or not UTF-8")))?;
        options.headers.extend([bearer(&key).map_err(CliError::input)?]);
    }
    Ok(options)
}

fn fields(json: &str) -> Result<Map<String, Value>, CliError> {
    serde_json::from_str(json).map_err(|error| CliError::input(format!("--body is not a JSON object: {error}")))
}

/// The first Ctrl-C ends the run and prints a report; the second kills the process.
async fn first_stop() {
    let mut stops = Stops::listen();
    stops.next().await;
    say("semmoe: stopping; press Ctrl-C again to exit at once");
    tokio::spawn(async move {
        stops.next().await;
        std::process::exit(CliError::interrupted().code.into());
    });
}

/// Determines the exit code from each server's counts of successful and failed requests.
fn verdict<const N: usize>(stopped: bool, servers: [(u64, u64); N], max_errors: Option<f64>) -> Result<(), CliError> {
    if stopped {
        return Err(CliError::interrupted());
    }
    for (ok, failed) in servers {
        let share = failed as f64 / (ok + failed).max(1) as f64;
        if ok == 0 {
            return Err(CliError::failed("no request succeeded"));
        }
        if max_errors.is_some_and(|most| share > most) {
            return Err(CliError::failed(format!(
                "the fraction of failed requests is {share:.4}, more than --max-errors allows"
            )));
        }
    }
    Ok(())
}

fn failure(error: LoadError) -> CliError {
    match error {
        LoadError::Cancelled => CliError::interrupted(),
        error => CliError::by_side(error.is_input(), error),
    }
}
