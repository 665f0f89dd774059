//! `[[models.backends]]`: engines that serve a model.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use semmoe_engines::http::BaseUrl;
use semmoe_engines::tls::ClientFiles;
use semmoe_engines::{Engine, RankBase};
use semmoe_planner::policy::Layout;
use serde::Deserialize;

use super::value::{printable, unique};
use super::{ConfigError, Result};

/// `[[models.backends]]`
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawBackend {
    /// Name used in metrics, headers and the admin plane; unique across all models.
    pub name: String,
    /// `sglang`, `vllm`, `semmoe` or `openai`.
    pub engine: String,
    /// `http://host:port`; set this or `urls`. A trailing `/v1` is ignored.
    #[serde(default)]
    pub url: String,
    /// One URL per rank: several `openai` servers that are the ranks of one engine, or vLLM with
    /// `--data-parallel-external-lb`. For vLLM with `--data-parallel-hybrid-lb`, one URL per node, in rank order. The
    /// backend is healthy when all of its URLs are.
    #[serde(default)]
    pub urls: Vec<String>,
    /// The model's name at this engine, if different. Requests that name the model or an alias are forwarded with this
    /// as their `model`; those for an adapter, with `served_name:adapter`, or just `adapter` for vLLM. Absent: names
    /// are forwarded as clients wrote them. Responses keep the engine's name.
    pub served_name: Option<String>,
    /// Tables for the placement that this backend runs.
    pub tables: Option<PathBuf>,
    /// Attention-DP ranks; absent: probed.
    pub ranks: Option<u16>,
    /// Digest of the placement that the engine runs, for engines that do not report one. Tables for other placements
    /// are not used. Absent: SGLang must report its placement, or the backend is routed by load; for other engines the
    /// tables' placement is assumed.
    pub placement_digest: Option<String>,
    /// `global` or `local`: how a vLLM that serves only some of the ranks numbers them in pins; absent: probed.
    pub rank_base: Option<RankBase>,
    /// File with the API key that this engine requires (`--api-key`), sent with every request and probe in place of the
    /// client's key.
    pub api_key_file: Option<PathBuf>,
    /// Certificates and names, for https URLs.
    pub tls: Option<ClientFiles>,
    /// Whether to use HTTP/2 to this engine; without TLS the engine must accept it with prior knowledge.
    #[serde(default)]
    pub http2: bool,
    /// The layout, `tp` or `ep`, of an engine without a switch hook, for `[switch]`: the one it runs or, with
    /// `switch.webhook`, the one it starts in.
    pub layout: Option<Layout>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BackendConfig {
    pub(crate) name: String,
    pub(crate) engine: Engine,
    /// One URL, or one per rank.
    pub(crate) urls: Vec<BaseUrl>,
    /// The engine's name for the model, if it differs from the clients'.
    pub(crate) served_name: Option<String>,
    pub(crate) tables: Option<PathBuf>,
    pub(crate) ranks: Option<u16>,
    pub(crate) placement_digest: Option<String>,
    pub(crate) rank_base: Option<RankBase>,
    pub(crate) api_key_file: Option<PathBuf>,
    /// Certificates and names for https URLs.
    pub(crate) tls: Option<ClientFiles>,
    pub(crate) http2: bool,
    /// The layout that an engine without a switch hook runs or starts in.
    pub(crate) layout: Option<Layout>,
    /// The discovery source; `None` for a configured backend.
    pub(crate) found: Option<Found>,
}

impl BackendConfig {
    /// The backend's only URL, or the first of several: a validated configuration has at least one.
    pub(crate) fn first_url(&self) -> &BaseUrl {
        &self.urls[0]
    }

    /// Whether both configure the same engine over the same connection, that is, differ at most in their tables.
    pub(crate) fn is_same_engine(&self, other: &Self) -> bool {
        let without_tables = |config: &Self| Self { tables: None, ..config.clone() };
        without_tables(self) == without_tables(other)
    }

    /// Whether both configure the same ranks: the same name, engine and URLs.
    pub(crate) fn is_same_ranks(&self, other: &Self) -> bool {
        (&self.name, self.engine, &self.urls) == (&other.name, other.engine, &other.urls)
    }
}

/// A backend's discovery source, and the address that it found.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Found {
    pub(crate) source: String,
    pub(crate) address: SocketAddr,
}

/// Validates a backend. `scoring`: the policy that requires scored prompts; `taken`: the names of other backends.
pub(super) fn backend(
    key: &str,
    raw: RawBackend,
    base: &Path,
    scoring: Option<&str>,
    taken: &mut HashSet<String>,
) -> Result<BackendConfig> {
    let wrong = |field: &str, cause: String| Err(ConfigError::value(format!("{key}.{field}"), cause));
    unique(&format!("{key}.name"), &raw.name, taken)?;
    // The header x-semmoe-backend contains the name.
    if !raw.name.is_ascii() {
        return wrong("name", format!("'{}' is not ASCII", raw.name));
    }
    let engine: Engine = raw.engine.parse().map_err(|error| ConfigError::value(format!("{key}.engine"), error))?;
    let urls = urls(key, engine, &raw)?;
    if let Some(policy) = scoring {
        if engine == Engine::Openai && urls.len() == 1 {
            let cause = format!(
                "requests to an openai engine with one URL cannot be pinned, so policy '{policy}' is unusable; \
                 set `urls`, one for each rank"
            );
            return wrong("engine", cause);
        }
        if raw.tables.is_none() {
            return wrong("tables", format!("must be set, because policy '{policy}' scores prompts with them"));
        }
    }
    if let Some(name) = &raw.served_name {
        printable(&format!("{key}.served_name"), name)?;
    }
    let ranks = ranks(&format!("{key}.ranks"), engine, raw.ranks, urls.len())?;
    if raw.rank_base.is_some() && engine != Engine::Vllm {
        return wrong("rank_base", format!("only supported by vllm, not by {engine}"));
    }
    if let Some(digest) = &raw.placement_digest
        && (digest.len() != 64 || !digest.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')))
    {
        return wrong("placement_digest", "not 64 lower-case hexadecimal digits".to_owned());
    }
    Ok(BackendConfig {
        name: raw.name,
        engine,
        tls: super::tls::client(key, raw.tls, &urls, base)?,
        http2: raw.http2,
        urls,
        served_name: raw.served_name,
        tables: raw.tables.map(|path| base.join(path)),
        ranks,
        placement_digest: raw.placement_digest,
        rank_base: raw.rank_base,
        api_key_file: raw.api_key_file.map(|path| base.join(path)),
        layout: raw.layout,
        found: None,
    })
}

/// Parses `url`, or each of `urls`.
fn urls(key: &str, engine: Engine, raw: &RawBackend) -> Result<Vec<BaseUrl>> {
    let parse =
        |key: String, url: &str| url.parse().map(BaseUrl::without_v1).map_err(|error| ConfigError::value(key, error));
    if raw.urls.is_empty() {
        return Ok(vec![parse(format!("{key}.url"), &raw.url)?]);
    }
    let key = format!("{key}.urls");
    if !raw.url.is_empty() {
        return Err(ConfigError::value(key, "`url` is set too, expected one of the two"));
    }
    if engine.speaks_sglang() {
        let cause = format!("{engine} serves all of its ranks at one URL; set `url`, or several backends");
        return Err(ConfigError::value(key, cause));
    }
    let mut urls: Vec<BaseUrl> = Vec::new();
    for (at, url) in raw.urls.iter().enumerate() {
        let url = parse(format!("{key}[{at}]"), url)?;
        if urls.contains(&url) {
            return Err(ConfigError::value(format!("{key}[{at}]"), format!("duplicate URL {url}")));
        }
        urls.push(url);
    }
    Ok(urls)
}

fn ranks(key: &str, engine: Engine, ranks: Option<u16>, urls: usize) -> Result<Option<u16>> {
    match (engine, ranks) {
        (Engine::Vllm, Some(ranks)) if urls > 1 && usize::from(ranks) % urls != 0 => {
            Err(ConfigError::value(key, format!("{ranks} is not a multiple of the number of URLs ({urls})")))
        }
        (Engine::Openai, Some(ranks)) if urls > 1 && usize::from(ranks) != urls => {
            Err(ConfigError::value(key, format!("{ranks}, but there are {urls} URLs, expected one rank per URL")))
        }
        (Engine::Openai, _) if urls > 1 => Ok(u16::try_from(urls).ok()),
        (_, Some(0)) => Err(ConfigError::value(key, "0, expected at least 1")),
        (Engine::Openai, Some(ranks)) if ranks != 1 => {
            Err(ConfigError::value(key, format!("{ranks}, but an openai engine has one rank per URL")))
        }
        (Engine::Openai, _) => Ok(Some(1)),
        (_, ranks) => Ok(ranks),
    }
}
