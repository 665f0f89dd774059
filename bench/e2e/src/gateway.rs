//! The gateway in front of one unit, in this process.

use std::path::Path;

use semmoe_engines::http::BaseUrl;
use semmoe_gateway::{Config, Gateway, RawBackend, RawConfig, RawModel, RawServer, Running};

use crate::error::BenchError;

/// The engine behind it, and how it routes.
#[derive(Debug)]
pub(crate) struct GatewaySpec<'a> {
    pub(crate) model: &'a Path,
    pub(crate) model_name: &'a str,
    pub(crate) engine: &'a BaseUrl,
    pub(crate) ranks: u16,
    pub(crate) policy: &'a str,
    /// T, for policies that need it.
    pub(crate) tables: Option<&'a Path>,
}

/// Starts it on free ports of 127.0.0.1.
pub(crate) async fn start(spec: &GatewaySpec<'_>) -> Result<Running, BenchError> {
    let raw = RawConfig {
        server: RawServer {
            listen: "127.0.0.1:0".to_owned(),
            admin: Some("127.0.0.1:0".to_owned()),
            tables_root: spec.tables.and_then(Path::parent).map(Path::to_owned),
            ..RawServer::default()
        },
        models: vec![RawModel {
            name: spec.model_name.to_owned(),
            tokenizer: Some(spec.model.join("tokenizer.json")),
            policy: spec.policy.to_owned(),
            backends: vec![RawBackend {
                name: "unit".to_owned(),
                engine: "semmoe".to_owned(),
                url: spec.engine.to_string(),
                tables: spec.tables.map(Path::to_owned),
                ranks: Some(spec.ranks),
                ..RawBackend::default()
            }],
            ..RawModel::default()
        }],
        ..RawConfig::default()
    };
    let config = Config::from_raw(raw, Path::new("")).map_err(BenchError::input)?;
    Gateway::start(config).await.map_err(BenchError::failed)
}
