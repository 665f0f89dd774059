//! First-run setup: records a profile from the bundled prompts, solves the tables and caches them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use semmoe_engines::Engine;
use semmoe_profiler::{ProfilerError, RecordOptions};
use semmoe_solver::{SolveOptions, TokenStrings};
use semmoe_tables::{Profile, Provenance, Tables, Trace};
use semmoe_worker::Ranks;
use semmoe_worker::model::ModelConfig;

use super::assets::Assets;
use super::cache::Cache;
use super::unit::{UnitLayout, UnitSpec};
use crate::commands::profile::{describe_record, failure, list_bad};
use crate::commands::solve::{Stop, solve_with_progress, threads, token_strings};
use crate::error::CliError;
use crate::progress::{Progress, say};
use crate::stamp::created;

/// Requests in flight per rank while recording.
const RECORD_CONCURRENCY_PER_RANK: usize = 4;
/// Only prompts are profiled: prompt tokens dominate the traffic, and each is computed only once.
const PROFILE_MAX_TOKENS: u32 = 1;
/// Solver seed. A model's tables depend only on this, the recorded routing and the tokenizer.
const SEED: u64 = 1;
/// Fraction of requests held out to evaluate the tables, which yields the expected rate on the admin page.
const HOLD_OUT: f64 = 0.1;

/// Ensures that the cache contains valid tables for a unit.
pub(crate) async fn prepare(assets: &Assets, cache: &Cache, layout: UnitLayout) -> Result<(), CliError> {
    let (profile_path, tables_path) = (cache.profile(), cache.tables(layout.redundant));
    if tables_path.exists() {
        match Tables::open(&tables_path) {
            Ok(_) => return Ok(()),
            Err(cause) => say(&format!("cannot use the cached tables ({cause}); solving again")),
        }
    }
    let work = Recording {
        prompts: &assets.profile_prompts,
        out: cache.trace(),
        max_tokens: PROFILE_MAX_TOKENS,
        title: "recording a profile",
    };
    let trace = recorded(assets, cache, layout, work).await?;
    let strings = token_strings(&assets.model)?;
    tokio::task::spawn_blocking(move || solve(&trace, layout, strings, &profile_path, &tables_path))
        .await
        .map_err(|error| CliError::failed(format!("the solver failed: {error}")))?
}

fn solve(
    trace: &Trace,
    layout: UnitLayout,
    strings: Arc<TokenStrings>,
    profile_path: &Path,
    tables_path: &Path,
) -> Result<(), CliError> {
    let profile = Profile::of_trace(trace).map_err(CliError::failed)?;
    profile.write(profile_path).map_err(CliError::failed)?;
    let source = format!("solved by up from profile {}", profile.digest());
    let mut options = solve_options(layout, Provenance { source, created: created() });
    options.seed = SEED;
    options.hold_out = HOLD_OUT;
    options.threads = threads();
    // The bounds only appear in the report, which is not used here.
    options.bounds = None;
    options.token_strings = Some(strings);
    let solved = solve_with_progress(&profile, Some(trace), &options, &Stop::default())?;
    solved.tables.write(tables_path).map_err(CliError::failed)?;
    Ok(())
}

fn solve_options(layout: UnitLayout, provenance: Provenance) -> SolveOptions {
    let redundant = layout.redundant;
    SolveOptions { redundant, ..SolveOptions::new(layout.ranks, layout.attention.attention, provenance) }
}

/// Rejects experts or replica slots that cannot be divided among the ranks, before anything is recorded.
pub(super) fn check_slots(assets: &Assets, layout: UnitLayout, check: bool) -> Result<(), CliError> {
    // The worker reports unreadable models, as it knows which files it needs.
    let Ok(config) = ModelConfig::load(&assets.model) else { return Ok(()) };
    let (experts, ranks) = (config.num_experts as u16, layout.ranks);
    // The check's baseline is contiguous placement without replicas.
    if layout.takes_tables() && (layout.redundant == 0 || check) && !experts.is_multiple_of(ranks) {
        let divisors = (1..=experts).filter(|ranks| experts.is_multiple_of(*ranks)).map(|ranks| ranks.to_string());
        let divisors = divisors.collect::<Vec<_>>().join(", ");
        let other = match check {
            true => " with --check".to_owned(),
            false => format!(", or --redundant {}", experts.next_multiple_of(ranks) - experts),
        };
        return Err(CliError::input(format!(
            "--ranks is {ranks}, expected a number that divides the {experts} experts: {divisors}{other}"
        )));
    }
    let provenance = Provenance { source: String::new(), created: created() };
    solve_options(layout, provenance).check_redundant(experts).map_err(CliError::input)
}

/// Reduces the layout to the largest number of ranks that divides the number of experts, as contiguous placement
/// requires.
fn dividing(assets: &Assets, layout: UnitLayout) -> UnitLayout {
    let Ok(config) = ModelConfig::load(&assets.model) else { return layout };
    let divides = |ranks: &u16| config.num_experts.is_multiple_of((*ranks).into());
    UnitLayout { ranks: (1..=layout.ranks).rev().find(divides).unwrap_or(1), ..layout }
}

/// A recording to make from a unit.
#[derive(Debug)]
pub(crate) struct Recording<'a> {
    pub(crate) prompts: &'a Path,
    pub(crate) out: PathBuf,
    pub(crate) max_tokens: u32,
    pub(crate) title: &'static str,
}

/// Returns the routing of some prompts: recorded by an earlier run with any kind of unit, otherwise recorded now from a
/// unit without tables.
pub(crate) async fn recorded(
    assets: &Assets,
    cache: &Cache,
    layout: UnitLayout,
    work: Recording<'_>,
) -> Result<Trace, CliError> {
    if work.out.exists() {
        match Trace::open(&work.out) {
            Ok(trace) => return Ok(trace),
            Err(cause) => say(&format!("cannot use the cached recording ({cause}); recording again")),
        }
    }
    let layout = dividing(assets, layout.to_record());
    let (out, recording) = (work.out.clone(), cache.recording(&work.out));
    let mut unit = UnitSpec { model: assets.model.clone(), tables: None, layout }.start().await?;
    record(assets, &mut unit, layout.ranks, Recording { out: recording.clone(), ..work }).await?;
    unit.stop().await;
    std::fs::rename(recording, &out)
        .map_err(|error| CliError::failed(format!("cannot store the recording {}: {error}", out.display())))?;
    Trace::open(&out).map_err(CliError::failed)
}

/// Sends the prompts directly to the unit and records the routing that it reports.
async fn record(assets: &Assets, unit: &mut Ranks, ranks: u16, work: Recording<'_>) -> Result<(), CliError> {
    let url = unit.url.parse().map_err(CliError::failed)?;
    let options = RecordOptions {
        tokenizer: Some(assets.model.clone()),
        max_tokens: work.max_tokens,
        concurrency: RECORD_CONCURRENCY_PER_RANK * usize::from(ranks),
        ..RecordOptions::new(Engine::Semmoe, url, work.prompts.to_owned(), work.out.clone(), created())
    };
    let progress = Progress::start(work.title, 0);
    let recording = async {
        match semmoe_profiler::record(options.clone(), &progress, std::future::pending()).await {
            // The directory is specific to this model and these prompts, so only another version can have recorded
            // differently.
            Err(ProfilerError::OtherPartial { difference, .. }) => {
                say(&format!("cannot resume the interrupted recording ({difference}); starting over"));
                semmoe_profiler::record(RecordOptions { fresh: true, ..options }, &progress, std::future::pending())
                    .await
            }
            outcome => outcome,
        }
    };
    let report = tokio::select! {
        report = recording => report.map_err(failure)?,
        death = unit.died() => return Err(super::unit::failure(death)),
    };
    progress.finish(&describe_record(&report));
    list_bad(&report.bad);
    Ok(())
}
