//! Builds profiles from traces, and merges profiles.

use std::path::{Path, PathBuf};

use semmoe_tables::{FormatError, ModelInfo, Phase, Profile, ProfileBuilder, Provenance, Trace};
use serde::Serialize;

use crate::ProfilerError;

/// What was built.
#[derive(Clone, Debug, Serialize)]
pub struct BuildReport {
    /// The profile.
    pub out: PathBuf,
    /// Digest of the profile.
    pub digest: String,
    /// The model.
    pub model: ModelInfo,
    /// Files that went in.
    pub inputs: usize,
    /// Tokens counted.
    pub tokens: u64,
}

/// Counts the tokens of a phase of traces of one model.
///
/// # Errors
/// Names the first trace that cannot be read or is of another model; nothing is written then.
pub fn build(traces: &[PathBuf], out: &Path, phase: Phase, created: &str) -> Result<BuildReport, ProfilerError> {
    let source = source("built from", traces);
    let mut sum: Option<ProfileBuilder> = None;
    for path in traces {
        let trace = Trace::open(path)?;
        let provenance = Provenance { source: source.clone(), created: created.into() };
        let builder = started(&mut sum, trace.model(), provenance, phase)?;
        builder.add_trace(&trace).map_err(|error| error.in_file(path))?;
    }
    write(sum, out, traces.len(), "trace")
}

/// Adds up profiles of one model and phase.
///
/// # Errors
/// Names the first profile that cannot be read or is of another model or phase; nothing is written then.
pub fn merge(profiles: &[PathBuf], out: &Path, created: &str) -> Result<BuildReport, ProfilerError> {
    let source = source("merged from", profiles);
    let mut sum: Option<ProfileBuilder> = None;
    for path in profiles {
        let profile = Profile::open(path)?;
        let provenance = Provenance { source: source.clone(), created: created.into() };
        let builder = started(&mut sum, profile.model(), provenance, profile.phase())?;
        builder.add_profile(&profile).map_err(|error| error.in_file(path))?;
    }
    write(sum, out, profiles.len(), "profile")
}

/// The sum so far; the first input says which model it is about.
fn started<'a>(
    sum: &'a mut Option<ProfileBuilder>,
    model: &ModelInfo,
    provenance: Provenance,
    phase: Phase,
) -> Result<&'a mut ProfileBuilder, FormatError> {
    match sum {
        Some(builder) => Ok(builder),
        None => Ok(sum.insert(ProfileBuilder::new(model.clone(), provenance, phase)?)),
    }
}

fn write(
    sum: Option<ProfileBuilder>,
    out: &Path,
    inputs: usize,
    what: &'static str,
) -> Result<BuildReport, ProfilerError> {
    let profile = sum.ok_or(ProfilerError::NoInput { what })?.finish().map_err(|error| error.in_file(out))?;
    let digest = profile.write(out)?;
    let (model, tokens) = (profile.model().clone(), profile.total_tokens());
    Ok(BuildReport { out: out.to_path_buf(), digest, model, inputs, tokens })
}

/// The first few names, for people: the counts are what matters.
fn source(verb: &str, inputs: &[PathBuf]) -> String {
    const NAMED: usize = 8;
    let name = |path: &PathBuf| path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    let mut names: Vec<String> = inputs.iter().take(NAMED).map(name).collect();
    if inputs.len() > NAMED {
        names.push(format!("{} more", inputs.len() - NAMED));
    }
    format!("{verb} {}", names.join(", "))
}
