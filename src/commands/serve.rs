//! `semmoe serve`.

use std::time::Duration;

use semmoe_gateway::{Config, Gateway};

use super::{announce, print};
use crate::args::ServeArgs;
use crate::error::CliError;
use crate::signals::{block_on, stop_requested};

/// How long requests may go on after a stop was asked for.
const GRACE: Duration = Duration::from_secs(30);

pub(crate) fn run(args: &ServeArgs) -> Result<(), CliError> {
    let config = Config::load(&args.config).map_err(CliError::input)?;
    block_on(async {
        if args.check {
            Gateway::check(&config).await.map_err(CliError::input)?;
            return print(&format!("{}: ok", args.config.display()));
        }
        let running = Gateway::start(config).await.map_err(CliError::failed)?;
        announce(&format!("ready: http://{}\nadmin: http://{}", running.data_addr(), running.admin_addr()));
        stop_requested().await;
        running.shutdown(GRACE).await;
        Ok(())
    })
}
