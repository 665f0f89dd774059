//! Builds profiles from traces of any size: checks and counts them in chunks on several threads, within a memory limit.
//!
//! | module | contents |
//! |---|---|
//! | `inputs` | the first pass: checks requests, decides which to count, counts token occurrences |
//! | `slab` | further passes: counts for as many layers and tokens as memory allows |
//! | `domains` | weights kinds of text equally |
//!
//! A profile is a pure function of its traces: it does not depend on the clock, the file order or the number of
//! threads.

mod domains;
mod inputs;
mod slab;

use std::path::{Path, PathBuf};

use semmoe_tables::{FormatError, ModelInfo, Phase, ProfileWriter, PromptSplit, TraceWriter, directory_of};
use serde::Serialize;

use crate::bad::allowed_bad;
use crate::error::{check, check_share};
use crate::merge::{MergeOptions, merge};
use crate::origin::{COUNTED, HELD_OUT, Origin};
use crate::{BadRecord, ProfilerError, Progress};
pub use domains::{DomainInput, DomainReport};
pub(crate) use domains::{by_domain, refuse_domains, weigh};
use inputs::{Checked, Fate, Inputs, LeftOut};
use slab::{Cells, Counting, sums_before};

/// Options of a build.
#[derive(Clone, Debug)]
pub struct BuildOptions {
    /// Traces of one model.
    pub traces: Vec<DomainInput>,
    /// The profile to write.
    pub out: PathBuf,
    /// Which tokens to count.
    pub phase: Phase,
    /// Number of threads, at least 1.
    pub threads: usize,
    /// Memory limit for counters in bytes; all else takes a few bytes per vocabulary token and layer.
    pub counter_bytes: u64,
    /// Give all domains equal weight.
    pub weight_by_domain: bool,
    /// Which requests to hold out, by prompt hash, and the trace to write them to.
    pub hold_out: Option<HoldOut>,
    /// The trace to write the counted requests to, without router weights, for `solve` to use along with the profile.
    pub solve_trace: Option<PathBuf>,
    /// Tolerated fraction of damaged requests, 0..1. They are skipped; a higher fraction is an error. A file that is
    /// entirely damaged counts as the number of requests estimated from its size.
    pub max_bad: f64,
}

/// Requests held out for evaluation.
#[derive(Clone, Debug)]
pub struct HoldOut {
    /// Approximate fraction of the requests, 0..1.
    pub share: f64,
    /// The trace to write, without router weights.
    pub out: PathBuf,
}

impl BuildOptions {
    /// Default options: all tokens, two threads, 512 MiB of counters, at most 1% damaged requests.
    pub fn new(traces: Vec<DomainInput>, out: PathBuf) -> Self {
        BuildOptions {
            traces,
            out,
            phase: Phase::All,
            threads: 2,
            counter_bytes: 512 << 20,
            weight_by_domain: false,
            hold_out: None,
            solve_trace: None,
            max_bad: 0.01,
        }
    }

    fn validate(&self) -> Result<(), ProfilerError> {
        check(self.threads > 0, "threads", 0, "at least 1")?;
        if let Some(HoldOut { share, .. }) = self.hold_out {
            check_share("hold_out", share)?;
        }
        if !self.weight_by_domain {
            refuse_domains(&self.traces)?;
        }
        check_share("max_bad", self.max_bad)
    }
}

/// The report of a build.
#[derive(Clone, Debug, Serialize)]
pub struct BuildReport {
    /// The profile.
    pub out: PathBuf,
    /// Digest of the profile.
    pub digest: String,
    /// The model.
    pub model: ModelInfo,
    /// Number of input files.
    pub inputs: usize,
    /// Tokens counted, after weighting.
    pub tokens: u64,
    /// Number of requests counted; 0 for merged profiles, which do not store the number.
    pub requests: usize,
    /// Requests held out.
    pub held_out: usize,
    /// Number of passes over the traces, including the check.
    pub passes: usize,
    /// Domains and their multipliers, if counts were weighted by domain.
    pub domains: Vec<DomainReport>,
    /// Skipped requests, and files that are no longer readable as traces.
    pub bad: Vec<BadRecord>,
}

/// Counts the tokens of one phase in traces of one model.
///
/// # Errors
/// If options are invalid, a trace is missing or of another model, no trace is readable, too many requests are damaged,
/// or a write fails. Nothing is written in these cases.
pub fn build(options: &BuildOptions, progress: &dyn Progress) -> Result<BuildReport, ProfilerError> {
    options.validate()?;
    let mut groups = open(options)?;
    let mut total: u64 = groups.iter().map(|group| group.inputs.tokens()).sum();
    progress.set_total(total);
    let share = options.hold_out.as_ref().map_or(0.0, |hold_out| hold_out.share);
    // Already split requests are split again in the same way for all inputs, which keeps equal prompts on one side.
    let splits = groups.iter().map(|group| group.inputs.origin.splits()).max().unwrap_or(0);
    let left_out = LeftOut { share, split: PromptSplit::PROFILE.after(splits) };
    let checked: Vec<Checked> =
        groups.iter_mut().map(|group| group.inputs.check(options.phase, left_out, options.threads, progress)).collect();
    let sum = |of: fn(&Checked) -> usize| checked.iter().map(of).sum();
    let (requests, held_out) = (sum(|group| group.counted), sum(|group| group.held_out));
    let mut bad: Vec<BadRecord> = groups.iter().flat_map(|group| group.inputs.unreadable.clone()).collect();
    bad.extend(checked.iter().flat_map(|group| group.bad.clone()));
    let lost: usize = groups.iter().map(|group| group.inputs.lost).sum();
    let unusable = lost + sum(|group| group.bad.len());
    refuse_bad(&bad, unusable, requests + held_out + unusable, options.max_bad)?;
    let mut groups_counted = groups.iter().zip(checked.into_iter().map(|group| group.occurrences));
    let report = if options.weight_by_domain {
        let parts = temporary_beside(&options.out)?;
        let (mut shards, mut passes) = (Vec::new(), 1);
        for (group, occurrences) in groups_counted {
            let out = parts.path().join(shards.len().to_string());
            passes = passes.max(count(options, &group.inputs, &out, occurrences, &mut total, progress)?.passes);
            shards.push(DomainInput { path: out, domain: group.domain.clone() });
        }
        let weighted = MergeOptions { weight_by_domain: true, ..MergeOptions::new(shards, options.out.clone()) };
        BuildReport { passes, ..merge(&MergeOptions { threads: options.threads, ..weighted })? }
    } else {
        let (group, occurrences) = groups_counted.next().ok_or(ProfilerError::NoInput("trace"))?;
        count(options, &group.inputs, &options.out, occurrences, &mut total, progress)?
    };
    if let Some(HoldOut { share, out }) = &options.hold_out {
        write_trace(&groups, Fate::HeldOut, &Origin::of_split(&format!("{HELD_OUT} {share}"), splits), out)?;
    }
    if let Some(out) = &options.solve_trace {
        write_trace(&groups, Fate::Counted, &Origin::of_split(COUNTED, splits), out)?;
    }
    let inputs = groups.iter().map(|group| group.inputs.files.len()).sum();
    Ok(BuildReport { inputs, requests, held_out, bad, ..report })
}

/// Traces counted into one profile.
struct Group {
    domain: Option<String>,
    inputs: Inputs,
}

/// Opens all traces as one group, or as one group per domain.
fn open(options: &BuildOptions) -> Result<Vec<Group>, ProfilerError> {
    if !options.weight_by_domain {
        let paths: Vec<&Path> = options.traces.iter().map(|input| input.path.as_path()).collect();
        return Ok(vec![Group { domain: None, inputs: Inputs::open(&paths)? }]);
    }
    let open =
        |(domain, paths): (String, Vec<&Path>)| Ok(Group { domain: Some(domain), inputs: Inputs::open(&paths)? });
    by_domain(&options.traces).into_iter().map(open).collect()
}

fn refuse_bad(bad: &[BadRecord], left_out: usize, of: usize, max_bad: f64) -> Result<(), ProfilerError> {
    let allowed = allowed_bad(max_bad, of);
    match bad.first() {
        Some(first) if left_out > allowed => Err(ProfilerError::TooManyBad {
            what: "requests",
            bad: left_out,
            of,
            allowed,
            first: Box::new(first.clone()),
            kept: "nothing was written".into(),
        }),
        _ => Ok(()),
    }
}

fn temporary_beside(out: &Path) -> Result<tempfile::TempDir, ProfilerError> {
    let directory = tempfile::Builder::new().prefix(".semmoe-domains-").tempdir_in(directory_of(out));
    directory.map_err(ProfilerError::io(out, "write"))
}

/// Runs all passes after the first. `total` is the work of all passes so far, in tokens.
fn count(
    options: &BuildOptions,
    inputs: &Inputs,
    out: &Path,
    occurrences: Vec<u64>,
    total: &mut u64,
    progress: &dyn Progress,
) -> Result<BuildReport, ProfilerError> {
    let model = &inputs.model;
    if let Some(token) = occurrences.iter().position(|&times| times > u64::from(u32::MAX)) {
        return Err(FormatError::CountOverflow { what: format!("token {token}"), bits: 32 }.into());
    }
    let before = sums_before(occurrences.iter().copied());
    let tokens = before.last().copied().unwrap_or_default();
    let cells = Cells::new(&occurrences, model.num_experts, model.top_k);
    let slabs = cells.slabs(model.layers(), options.counter_bytes / size_of::<u32>() as u64);
    *total += slabs.iter().map(|slab| before[slab.tokens.end] - before[slab.tokens.start]).sum::<u64>();
    progress.set_total(*total);
    let mut writer = ProfileWriter::create(out, model.clone(), inputs.origin.provenance(), options.phase, occurrences)?;
    let pieces = inputs.pieces();
    let (phase, threads) = (options.phase, options.threads);
    let counting = Counting { inputs, pieces: &pieces, phase, cells: &cells, before: &before, threads, progress };
    for slab in &slabs {
        counting.count(slab, &mut writer)?;
    }
    Ok(BuildReport {
        out: out.to_path_buf(),
        digest: writer.finish()?,
        model: model.clone(),
        inputs: inputs.files.len(),
        tokens,
        requests: 0,
        held_out: 0,
        passes: 1 + slabs.len(),
        domains: Vec::new(),
        bad: Vec::new(),
    })
}

/// Writes all requests with the given fate to a trace.
fn write_trace(groups: &[Group], fate: Fate, source: &str, out: &Path) -> Result<(), ProfilerError> {
    let mut origin = Origin::default();
    groups.iter().for_each(|group| origin.add(&group.inputs.origin.provenance()));
    origin.add_source(source);
    let Some(model) = groups.first().map(|group| group.inputs.model.clone()) else { return Ok(()) };
    let mut writer = TraceWriter::create(out, model, origin.provenance(), false)?;
    groups.iter().try_for_each(|group| group.inputs.write(fate, &mut writer))?;
    writer.finish()?;
    Ok(())
}
