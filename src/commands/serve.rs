//! `semmoe serve`.

use std::convert::Infallible;
use std::path::Path;

use semmoe_gateway::{Config, Gateway, LogFormat, Probed, ReloadError, Running};
use serde::Serialize;

use super::quick::configuration;
use super::watch::Watch;
use super::{announce, print, print_json};
use crate::LogChoice;
use crate::args::ServeArgs;
use crate::environment::overrides;
use crate::error::CliError;
use crate::notify::{Notice, notify};
use crate::signals::{Hangups, Stop, Stops, block_on};

pub(crate) fn run(args: &ServeArgs, log: LogChoice) -> Result<(), CliError> {
    let overrides = overrides(std::env::vars_os())?;
    let watch = args.config.as_deref().filter(|_| args.watch).map(Watch::new);
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
    log.start(config.log().level, config.log().format == LogFormat::Json);
    semmoe_gateway::raise_file_limit();
    block_on(async {
        if args.check {
            return check(args, config).await;
        }
        // Installed before the gateway starts, so that no signal is missed. From here on SIGHUP no longer kills the
        // process.
        let (mut stops, mut hangups) = (Stops::listen(), Hangups::listen());
        let running = Gateway::start(config).await.map_err(|error| CliError::by_side(error.is_input(), error))?;
        notify(Notice::Ready);
        announce(&format!("ready: {}\nadmin: {}", running.data_url(), running.admin_url()));
        let stop = tokio::select! {
            stop = stops.next() => stop,
            // The log and the metrics report the outcome of each reload.
            never = reload_on(&mut hangups, watch, &running) => match never {},
        };
        notify(Notice::Stopping);
        tokio::select! {
            // With Ctrl-C there is no load balancer to notify.
            () = running.drain(stop == Stop::Interrupt) => Ok(()),
            _ = stops.next() => Err(CliError::interrupted()),
        }
    })
}

async fn check(args: &ServeArgs, config: Config) -> Result<(), CliError> {
    let checked = if args.probe { Gateway::probe(config).await } else { Gateway::check(&config).await };
    let checked = checked.map_err(CliError::input)?;
    print_checked(args, &checked)?;
    match checked.troubles {
        none if none.is_empty() => Ok(()),
        troubles if args.probe => Err(CliError::failed(troubles)),
        troubles => Err(CliError::input(troubles)),
    }
}

fn print_checked(args: &ServeArgs, Probed { served, troubles }: &Probed) -> Result<(), CliError> {
    #[derive(Serialize)]
    struct Checked<'a> {
        /// Null if options are used instead of a file.
        file: Option<&'a Path>,
        ok: bool,
        served: String,
        troubles: String,
    }
    let (served, troubles) = (served.to_string(), troubles.to_string());
    let checked = Checked { file: args.config.as_deref(), ok: troubles.is_empty(), served, troubles };
    if args.json {
        return print_json("serve --check", &checked);
    }
    let what = args.config.as_deref().map_or_else(|| "options".into(), Path::to_string_lossy);
    let verdict = match (checked.ok, args.probe) {
        (true, _) => "ok",
        (false, true) => "engines do not match",
        (false, false) => "files do not match",
    };
    print(&format!("{what}: {verdict}\n{}", checked.served))
}

async fn reload_on(hangups: &mut Hangups, mut watch: Option<Watch>, running: &Running) -> Infallible {
    loop {
        let changed = async {
            match &mut watch {
                Some(watch) => watch.changed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = hangups.next() => {}
            () = changed => {}
        }
        let done = running.reload().await;
        if let (Some(watch), Err(ReloadError::Refused(_) | ReloadError::Moving { .. })) = (&mut watch, done) {
            watch.try_again();
        }
    }
}
