//! `semmoe serve`.

use std::convert::Infallible;

use semmoe_gateway::{Config, Gateway, LogFormat, Probed, Running};

use super::{announce, print};
use crate::LogChoice;
use crate::args::ServeArgs;
use crate::error::CliError;
use crate::signals::{Hangups, Stop, Stops, block_on};

pub(crate) fn run(args: &ServeArgs, log: LogChoice) -> Result<(), CliError> {
    let config = Config::load(&args.config).map_err(CliError::input)?;
    log.start(config.log().level.into(), config.log().format == LogFormat::Json);
    semmoe_gateway::raise_file_limit();
    block_on(async {
        if args.check {
            return check(args, config).await;
        }
        // Before anything can be asked to stop, so that no signal is missed; and from here on SIGHUP does not end the process.
        let (mut stops, mut hangups) = (Stops::listen(), Hangups::listen());
        let running = Gateway::start(config).await.map_err(CliError::failed)?;
        announce(&format!("ready: {}\nadmin: {}", running.data_url(), running.admin_url()));
        let stop = tokio::select! {
            stop = stops.next() => stop,
            // What came of each reload is in the log and in the metrics.
            never = reload_on(&mut hangups, &running) => match never {},
        };
        tokio::select! {
            // Who presses Ctrl-C has no load balancer to tell.
            () = running.drain(stop == Stop::Interrupt) => Ok(()),
            _ = stops.next() => Err(CliError::Interrupted),
        }
    })
}

async fn check(args: &ServeArgs, config: Config) -> Result<(), CliError> {
    let file = args.config.display();
    if !args.probe {
        let served = Gateway::check(&config).await.map_err(CliError::input)?;
        return print(&format!("{file}: ok\n{served}"));
    }
    let Probed { served, troubles } = Gateway::probe(config).await.map_err(CliError::input)?;
    let verdict = if troubles.is_empty() { "ok" } else { "engines do not fit" };
    print(&format!("{file}: {verdict}\n{served}"))?;
    if troubles.is_empty() { Ok(()) } else { Err(CliError::failed(troubles)) }
}

async fn reload_on(hangups: &mut Hangups, running: &Running) -> Infallible {
    loop {
        hangups.next().await;
        let _ = running.reload().await;
    }
}
