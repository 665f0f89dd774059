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
    /// Name in metrics, headers and the admin plane; unique over all models.
    pub name: String,
    /// `sglang`, `vllm`, `semmoe` or `openai`.
    pub engine: String,
    /// `http://host:port`; this or `urls`. A trailing `/v1` is ignored.
    #[serde(default)]
    pub url: String,
    /// One URL for each rank: several `openai` servers that are the ranks of one engine, or vLLM with
    /// `--data-parallel-external-lb`. For vLLM with `--data-parallel-hybrid-lb`, one URL for each node, in the order of
    /// their ranks. The backend is healthy when all of them are.
    #[serde(default)]
    pub urls: Vec<String>,
    /// The model's name at this engine, if it differs: requests that name the model or an alias get it as their
    /// `model`, those for an adapter `served_name:adapter`, or just `adapter` for vLLM. Absent: names are forwarded as
    /// clients wrote them. Answers keep the engine's name.
    pub served_name: Option<String>,
    /// Tables for the placement that this backend runs.
    pub tables: Option<PathBuf>,
    /// Attention-DP ranks; absent: probed.
    pub ranks: Option<u16>,
    /// Digest of the placement that the engine runs, where the engine does not report one. Tables for another placement
    /// are not used. Absent: SGLang must report its placement, or the backend is routed by load; for other engines the
    /// tables' placement is assumed.
    pub placement_digest: Option<String>,
    /// `global` or `local`: how a vLLM that serves some of the ranks numbers them in pins; absent: probed.
    pub rank_base: Option<RankBase>,
    /// File with the key that this engine requires (`--api-key`); sent with every request and probe in place of the
    /// client's.
    pub api_key_file: Option<PathBuf>,
    /// Certificates and names, for https URLs.
    pub tls: Option<ClientFiles>,
    /// HTTP/2 to this engine; without TLS the engine must accept it with prior knowledge.
    #[serde(default)]
    pub http2: bool,
    /// For `[switch]` and an engine without a switch hook: the layout it runs, `tp` or `ep`; with `switch.webhook`, the
    /// layout it starts in.
    pub layout: Option<Layout>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BackendConfig {
    pub(crate) name: String,
    pub(crate) engine: Engine,
    /// One URL, or one for each rank.
    pub(crate) urls: Vec<BaseUrl>,
    /// The engine's name for the model, if it differs from the one that clients use.
    pub(crate) served_name: Option<String>,
    pub(crate) tables: Option<PathBuf>,
    pub(crate) ranks: Option<u16>,
    pub(crate) placement_digest: Option<String>,
    pub(crate) rank_base: Option<RankBase>,
    pub(crate) api_key_file: Option<PathBuf>,
    /// For https URLs.
    pub(crate) tls: Option<ClientFiles>,
    pub(crate) http2: bool,
    /// The layout that an engine without a switch hook runs or starts in.
    pub(crate) layout: Option<Layout>,
    /// `None` for a configured backend.
    pub(crate) found: Option<Found>,
}

impl BackendConfig {
    /// Its only URL, or the first of several: a checked configuration has at least one.
    pub(crate) fn first_url(&self) -> &BaseUrl {
        &self.urls[0]
    }

    /// Whether both configure the same engine over the same connection: everything but the tables is equal.
    pub(crate) fn is_same_engine(&self, other: &Self) -> bool {
        let without_tables = |config: &Self| Self { tables: None, ..config.clone() };
        without_tables(self) == without_tables(other)
    }

    /// Whether both configure the same ranks: the same engine at the same address.
    pub(crate) fn is_same_ranks(&self, other: &Self) -> bool {
        (&self.name, self.engine, &self.urls) == (&other.name, other.engine, &other.urls)
    }
}

/// The source that found a backend, and its address.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Found {
    pub(crate) source: String,
    pub(crate) address: SocketAddr,
}

/// Checks a backend. `scoring`: the policy that requires scored prompts; `taken`: the names of other backends.
pub(super) fn backend(
    key: &str,
    raw: RawBackend,
    base: &Path,
    scoring: Option<&str>,
    taken: &mut HashSet<String>,
) -> Result<BackendConfig> {
    let wrong = |field: &str, cause: String| Err(ConfigError::value(format!("{key}.{field}"), cause));
    unique(&format!("{key}.name"), &raw.name, taken)?;
    // The header x-semmoe-backend carries it.
    if !raw.name.is_ascii() {
        return wrong("name", format!("'{}' is not ASCII", raw.name));
    }
    let engine: Engine = raw.engine.parse().map_err(|error| ConfigError::value(format!("{key}.engine"), error))?;
    let urls = urls(key, engine, &raw)?;
    if let Some(policy) = scoring {
        if engine == Engine::Openai && urls.len() == 1 {
            let cause = format!(
                "a request to an openai engine with one URL cannot be pinned, so policy '{policy}' cannot be used; \
                 set `urls`, one for each rank"
            );
            return wrong("engine", cause);
        }
        if raw.tables.is_none() {
            return wrong("tables", format!("must be set, as policy '{policy}' scores prompts with them"));
        }
    }
    if let Some(name) = &raw.served_name {
        printable(&format!("{key}.served_name"), name)?;
    }
    let ranks = ranks(&format!("{key}.ranks"), engine, raw.ranks, urls.len())?;
    if raw.rank_base.is_some() && engine != Engine::Vllm {
        return wrong("rank_base", format!("only vllm has one, not {engine}"));
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

/// `url`, or one of `urls` for each rank.
fn urls(key: &str, engine: Engine, raw: &RawBackend) -> Result<Vec<BaseUrl>> {
    let parse =
        |key: String, url: &str| url.parse().map(BaseUrl::without_v1).map_err(|error| ConfigError::value(key, error));
    if raw.urls.is_empty() {
        return Ok(vec![parse(format!("{key}.url"), &raw.url)?]);
    }
    let key = format!("{key}.urls");
    if !raw.url.is_empty() {
        return Err(ConfigError::value(key, "set beside `url`, expected one of the two"));
    }
    if engine.speaks_sglang() {
        let cause = format!("one {engine} engine has all of its ranks behind one URL; set `url`, or several backends");
        return Err(ConfigError::value(key, cause));
    }
    let mut urls: Vec<BaseUrl> = Vec::new();
    for (at, url) in raw.urls.iter().enumerate() {
        let url = parse(format!("{key}[{at}]"), url)?;
        if urls.contains(&url) {
            return Err(ConfigError::value(format!("{key}[{at}]"), format!("{url} is there already")));
        }
        urls.push(url);
    }
    Ok(urls)
}

fn ranks(key: &str, engine: Engine, ranks: Option<u16>, urls: usize) -> Result<Option<u16>> {
    match (engine, ranks) {
        (Engine::Vllm, Some(ranks)) if urls > 1 && usize::from(ranks) % urls != 0 => {
            Err(ConfigError::value(key, format!("{ranks}, but there are {urls} URLs, each for as many ranks")))
        }
        (Engine::Openai, Some(ranks)) if urls > 1 && usize::from(ranks) != urls => {
            Err(ConfigError::value(key, format!("{ranks}, but there are {urls} URLs, one for each rank")))
        }
        (Engine::Openai, _) if urls > 1 => Ok(u16::try_from(urls).ok()),
        (_, Some(0)) => Err(ConfigError::value(key, "0, expected at least 1")),
        (Engine::Openai, Some(ranks)) if ranks != 1 => {
            Err(ConfigError::value(key, format!("{ranks}, but an openai engine is one rank for each URL")))
        }
        (Engine::Openai, _) => Ok(Some(1)),
        (_, ranks) => Ok(ranks),
    }
}
