//! The first run: record a profile from the bundled prompts, solve, and cache the tables.

use semmoe_engines::Engine;
use semmoe_profiler::RecordOptions;
use semmoe_solver::SolveOptions;
use semmoe_tables::{Attention, Phase, ProfileBuilder, Provenance, Tables, Trace};

use super::assets::Assets;
use super::cache::Cache;
use super::unit::{Unit, UnitSpec};
use crate::commands::profile::{describe_record, failure, list_bad};
use crate::commands::solve::{solve_with_progress, threads};
use crate::error::CliError;
use crate::progress::{Progress, say};
use crate::stamp::created;

/// Share of the profiled requests that is kept from the solver, to predict on.
const HOLD_OUT: f64 = 0.15;
/// Requests in flight while recording, for each rank.
const RECORD_CONCURRENCY_PER_RANK: usize = 4;
/// The tables of a model depend on nothing but the recorded routing and this.
const SEED: u64 = 1;

/// Makes sure that the cache holds valid tables.
pub(crate) async fn prepare(assets: &Assets, cache: &Cache, ranks: u16) -> Result<(), CliError> {
    match cached(cache) {
        Ok(true) => return Ok(()),
        Ok(false) => {}
        Err(cause) => say(&format!("the cached tables cannot be used ({cause}); they are made again")),
    }
    let trace = record(assets, cache, ranks).await?;
    let (solve_trace, tables_path) = (cache.solve_trace(), cache.tables());
    let (profile_path, holdout_path) = (cache.profile(), cache.holdout_trace());
    tokio::task::spawn_blocking(move || {
        let (solving, holdout) = semmoe_profiler::split(&trace, HOLD_OUT).map_err(failure)?;
        solving.write(&solve_trace).map_err(CliError::failed)?;
        holdout.write(&holdout_path).map_err(CliError::failed)?;
        let mut builder = ProfileBuilder::new(solving.model().clone(), solving.provenance().clone(), Phase::All)
            .map_err(CliError::failed)?;
        builder.add_trace(&solving).map_err(CliError::failed)?;
        builder.write(&profile_path).map_err(CliError::failed)?;
        let profile = builder.finish().map_err(CliError::failed)?;
        let source = format!("solved by up from profile {}", profile.digest());
        let mut options = SolveOptions::new(ranks, Attention::Dp, Provenance { source, created: created() });
        options.seed = SEED;
        options.threads = threads();
        let solved = solve_with_progress(&profile, Some(&solving), &options)?;
        solved.tables.write(&tables_path).map_err(CliError::failed)?;
        Ok(())
    })
    .await
    .map_err(|error| CliError::failed(format!("the solver failed: {error}")))?
}

/// Whether tables and the hold-out trace are there and valid.
fn cached(cache: &Cache) -> Result<bool, CliError> {
    if !cache.tables().exists() {
        return Ok(false);
    }
    let tables = Tables::open(&cache.tables()).map_err(CliError::input)?;
    let holdout = Trace::open(&cache.holdout_trace()).map_err(CliError::input)?;
    tables.model().check_compatible(holdout.model()).map_err(CliError::input)?;
    Ok(true)
}

/// Records the bundled prompts from a unit with contiguous placement.
async fn record(assets: &Assets, cache: &Cache, ranks: u16) -> Result<Trace, CliError> {
    let spec = UnitSpec { model: assets.model.clone(), ranks, tables: None };
    let mut unit = Unit::start(&spec).await?;
    let url = unit.url.parse().map_err(CliError::failed)?;
    let out = cache.folder().join("all.trace.safetensors");
    let options = RecordOptions {
        tokenizer: Some(assets.model.clone()),
        concurrency: RECORD_CONCURRENCY_PER_RANK * usize::from(ranks),
        ..RecordOptions::new(Engine::Semmoe, url, assets.profile_prompts.clone(), out.clone(), created())
    };
    let progress = Progress::start("recording a profile", 0);
    let report = tokio::select! {
        report = semmoe_profiler::record(options, &progress, std::future::pending()) => report.map_err(failure)?,
        death = unit.died() => return Err(death.into_error()),
    };
    progress.finish(&describe_record(&report));
    list_bad(&report.bad);
    unit.stop().await;
    let trace = Trace::open(&out).map_err(CliError::failed)?;
    // Its content goes on in the two parts; the map keeps it readable until then.
    std::fs::remove_file(&out)
        .map_err(|error| CliError::failed(format!("cannot remove {}: {error}", out.display())))?;
    Ok(trace)
}
