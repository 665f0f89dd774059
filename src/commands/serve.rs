//! `semmoe serve`.

use std::convert::Infallible;
use std::path::Path;

use semmoe_gateway::{Config, Gateway, LogFormat, Probed, Running};

use super::quick::configuration;
use super::{announce, print};
use crate::LogChoice;
use crate::args::ServeArgs;
use crate::environment::overrides;
use crate::error::CliError;
use crate::notify::{Notice, notify};
use crate::signals::{Hangups, Stop, Stops, block_on};

pub(crate) fn run(args: &ServeArgs, log: LogChoice) -> Result<(), CliError> {
    let overrides = overrides(std::env::vars_os())?;
    let config = match &args.config {
        Some(file) => Config::load_with(file, overrides).map_err(CliError::input)?,
        None => {
            let text = block_on(configuration(&args.quick))?;
            let config = Config::from_toml_with(&text, Path::new(""), overrides).map_err(CliError::input)?;
            if args.quick.print_config {
                return print(text.trim_end());
            }
            config
        }
    };
    log.start(config.log().level.into(), config.log().format == LogFormat::Json);
    semmoe_gateway::raise_file_limit();
    block_on(async {
        if args.check {
            return check(args, config).await;
        }
        // Before anything can be asked to stop, so that no signal is missed; and from here on SIGHUP does not end the process.
        let (mut stops, mut hangups) = (Stops::listen(), Hangups::listen());
        let running = Gateway::start(config).await.map_err(CliError::failed)?;
        notify(Notice::Ready);
        announce(&format!("ready: {}\nadmin: {}", running.data_url(), running.admin_url()));
        let stop = tokio::select! {
            stop = stops.next() => stop,
            // What came of each reload is in the log and in the metrics.
            never = reload_on(&mut hangups, &running) => match never {},
        };
        notify(Notice::Stopping);
        tokio::select! {
            // Who presses Ctrl-C has no load balancer to tell.
            () = running.drain(stop == Stop::Interrupt) => Ok(()),
            _ = stops.next() => Err(CliError::Interrupted),
        }
    })
}

async fn check(args: &ServeArgs, config: Config) -> Result<(), CliError> {
    let what = args.config.as_deref().map_or_else(|| "options".into(), Path::to_string_lossy);
    if !args.probe {
        let served = Gateway::check(&config).await.map_err(CliError::input)?;
        return print(&format!("{what}: ok\n{served}"));
    }
    let Probed { served, troubles } = Gateway::probe(config).await.map_err(CliError::input)?;
    let verdict = if troubles.is_empty() { "ok" } else { "engines do not fit" };
    print(&format!("{what}: {verdict}\n{served}"))?;
    if troubles.is_empty() { Ok(()) } else { Err(CliError::failed(troubles)) }
}

async fn reload_on(hangups: &mut Hangups, running: &Running) -> Infallible {
    loop {
        hangups.next().await;
        let _ = running.reload().await;
    }
}
