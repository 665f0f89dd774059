//! `semmoe serve`.

use semmoe_gateway::{Config, Gateway, LogFormat};

use super::{announce, print};
use crate::LogChoice;
use crate::args::ServeArgs;
use crate::error::CliError;
use crate::signals::{Stop, Stops, block_on};

pub(crate) fn run(args: &ServeArgs, log: LogChoice) -> Result<(), CliError> {
    let config = Config::load(&args.config).map_err(CliError::input)?;
    log.start(config.log().level.into(), config.log().format == LogFormat::Json);
    block_on(async {
        if args.check {
            Gateway::check(&config).await.map_err(CliError::input)?;
            return print(&format!("{}: ok", args.config.display()));
        }
        // Before anything can be asked to stop, so that no signal is missed.
        let mut stops = Stops::listen();
        let running = Gateway::start(config).await.map_err(CliError::failed)?;
        announce(&format!("ready: http://{}\nadmin: http://{}", running.data_addr(), running.admin_addr()));
        let stop = stops.next().await;
        tokio::select! {
            // Who presses Ctrl-C has no load balancer to tell.
            () = running.drain(stop == Stop::Interrupt) => Ok(()),
            _ = stops.next() => Err(CliError::Interrupted),
        }
    })
}
