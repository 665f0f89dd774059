//! Whole sampled requests as traces, if configured: token ids and routes in their original order.
//!
//! Each model has one open trace in memory; it is written when it is full, when profiles are written, and at shutdown.
//! Files are readable only by their owner, and are deleted by age and number.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use semmoe_tables::{FormatError, ModelInfo, Provenance, TraceBuilder};

use super::files;
use super::kept::{found_or, now, rfc3339};
use super::observe::Observed;
use crate::config::{Config, TraceConfig};
use crate::observe::metrics::LiveMetrics;

const SUFFIX: &str = ".trace.safetensors";

/// The open traces, by model.
pub(super) type Traces = BTreeMap<String, Open>;

pub(super) struct Open {
    builder: TraceBuilder,
    began: u64,
}

impl Open {
    fn new(model: &ModelInfo, began: u64) -> Result<Self, FormatError> {
        let provenance = Provenance { source: "sampled requests".to_owned(), created: rfc3339(began) };
        Ok(Self { builder: TraceBuilder::new(model.clone(), provenance)?, began })
    }
}

/// Adds a request to its model's trace. Blocking, because a full trace is written at once.
pub(super) fn add(
    traces: &mut Traces,
    metrics: &LiveMetrics,
    config: &TraceConfig,
    model: &str,
    observed: &Observed,
) -> Result<(), FormatError> {
    let open = found_or(traces, model, || Open::new(&observed.model, now()))?;
    open.builder.push(&observed.ids, observed.prompt, &observed.routes, None)?;
    if open.builder.tokens() >= config.tokens
        && let Some(full) = traces.remove(model)
    {
        write(metrics, config, model, &full);
    }
    Ok(())
}

/// Writes all open traces and deletes old files, including those of earlier runs. Blocking.
pub(super) fn write_all(traces: &mut Traces, metrics: &LiveMetrics, config: &Config) {
    let models = &config.models;
    let Some(config) = &config.sampling.traces else { return };
    for (model, open) in std::mem::take(traces) {
        write(metrics, config, &model, &open);
    }
    for model in models {
        remove_old(config, &model.name);
    }
}

fn write(metrics: &LiveMetrics, config: &TraceConfig, model: &str, open: &Open) {
    let written = match open.builder.to_bytes() {
        Ok(bytes) => free_path(&config.dir, model, open.began).and_then(|path| files::write(&path, &bytes)),
        Err(error) => Err(std::io::Error::other(error)),
    };
    metrics.trace_written(if written.is_ok() { "ok" } else { "failed" });
    if let Err(error) = written {
        let dir = config.dir.display();
        tracing::warn!(model, %dir, %error, "a trace was lost");
    }
    remove_old(config, model);
}

/// Returns an unused path. A trace may fill up within the second in which it began, so a number distinguishes them.
fn free_path(dir: &Path, model: &str, began: u64) -> std::io::Result<PathBuf> {
    let name = files::name(model);
    let paths = (0..1000).map(|number| dir.join(format!("{name}.{began}.{number}{SUFFIX}")));
    paths.into_iter().find(|path| !path.exists()).ok_or_else(|| std::io::Error::other("1000 traces in one second"))
}

/// Deletes a model's traces that exceed the maximum age or number.
fn remove_old(config: &TraceConfig, model: &str) {
    let prefix = format!("{}.", files::name(model));
    let Ok(entries) = std::fs::read_dir(&config.dir) else { return };
    let ours = entries.flatten().filter_map(|entry| Some((began(entry.file_name().to_str()?, &prefix)?, entry.path())));
    let mut ours: Vec<((u64, u64), PathBuf)> = ours.collect();
    ours.sort();
    let surplus = ours.len().saturating_sub(config.files);
    for (at, ((began, _), path)) in ours.iter().enumerate() {
        if (at < surplus || now().saturating_sub(*began) >= config.retention.as_secs())
            && let Err(error) = std::fs::remove_file(path)
        {
            tracing::warn!(path = %path.display(), %error, "an old trace could not be deleted");
        }
    }
}

/// Parses a trace file's name: its start time, and its number within that second; `None` for any other file.
fn began(file: &str, prefix: &str) -> Option<(u64, u64)> {
    let (began, number) = file.strip_prefix(prefix)?.strip_suffix(SUFFIX)?.split_once('.')?;
    Some((began.parse().ok()?, number.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn old_and_surplus_files_go_and_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let config =
            TraceConfig { dir: dir.path().to_owned(), tokens: 1, files: 2, retention: Duration::from_secs(3600) };
        let time = now();
        let touch = |name: String| std::fs::write(dir.path().join(name), "").unwrap();
        for name in
            ["a.profile.safetensors", "a.x.0.trace.safetensors", "a.1.trace.safetensors", "b.1.0.trace.safetensors"]
        {
            touch(name.to_owned());
        }
        for began in [1, time - 3600, time - 30, time - 20] {
            touch(format!("a.{began}.0{SUFFIX}"));
        }
        remove_old(&config, "a");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 6);
        for number in 0..3 {
            let path = free_path(dir.path(), "a", time).unwrap();
            assert_eq!(path, dir.path().join(format!("a.{time}.{number}{SUFFIX}")));
            std::fs::write(path, "").unwrap();
        }
        remove_old(&config, "a");
        let mut left: Vec<String> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| began(name, "a.").is_some())
            .collect();
        left.sort();
        assert_eq!(left, [format!("a.{time}.1{SUFFIX}"), format!("a.{time}.2{SUFFIX}")]);
    }
}
