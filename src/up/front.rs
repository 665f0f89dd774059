//! The gateway in front of the unit started by `up`.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;

use semmoe_gateway::{Config, Gateway, RawBackend, RawConfig, RawModel, RawSampling, RawServer, Running};

use super::assets::Assets;
use crate::error::CliError;

/// Settings for the gateway that `up` starts.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Front {
    /// Data port on loopback; the admin listener uses the next port. With 0 the system chooses both ports.
    pub(crate) port: u16,
    /// Whether to request routed experts with every request, so that the admin page shows observed figures.
    pub(crate) samples: bool,
}

/// Starts the gateway in front of the unit at `engine_url`, which has `ranks` ranks to route to. The policy is
/// `affinity` with tables, otherwise `round_robin`.
pub(crate) async fn start_gateway(
    assets: &Assets,
    engine_url: &str,
    ranks: u16,
    tables: Option<&Path>,
    front: Front,
) -> Result<Running, CliError> {
    let address = |port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port)).to_string();
    let (port, admin_port) = (front.port, next_port(front.port)?);
    let raw = RawConfig {
        server: RawServer {
            listen: address(port),
            admin: Some(address(admin_port)),
            tables_root: tables.and_then(Path::parent).map(Path::to_owned),
            ..RawServer::default()
        },
        models: vec![RawModel {
            name: assets.model_name()?,
            tokenizer: Some(assets.model.join("tokenizer.json")),
            policy: if tables.is_some() { "affinity" } else { "round_robin" }.to_owned(),
            backends: vec![RawBackend {
                name: "local".to_owned(),
                engine: "semmoe".to_owned(),
                url: engine_url.to_owned(),
                tables: tables.map(Path::to_owned),
                ranks: Some(ranks),
                ..RawBackend::default()
            }],
            ..RawModel::default()
        }],
        sampling: RawSampling { share: if front.samples { 1.0 } else { 0.0 }, ..RawSampling::default() },
        ..RawConfig::default()
    };
    let config = Config::from_raw(raw, Path::new("")).map_err(CliError::input)?;
    Gateway::start(config).await.map_err(CliError::failed)
}

/// Fails before any work if a required port is taken.
pub(crate) fn check_ports(port: u16) -> Result<(), CliError> {
    for port in [port, next_port(port)?].into_iter().filter(|&port| port != 0) {
        TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map_err(|error| {
            let cause = match error.kind() {
                std::io::ErrorKind::AddrInUse => "it is in use by another process".to_owned(),
                _ => error.to_string(),
            };
            CliError::failed(format!("cannot listen on port {port} of 127.0.0.1: {cause}; choose another with --port"))
        })?;
    }
    Ok(())
}

fn next_port(port: u16) -> Result<u16, CliError> {
    match port {
        0 => Ok(0),
        u16::MAX => Err(CliError::input("--port 65535 leaves no port for the admin listener")),
        port => Ok(port + 1),
    }
}
