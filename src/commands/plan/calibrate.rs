//! `semmoe plan calibrate`: measures this machine by running the worker's code, for use by `semmoe plan`.
//!
//! | module | contents |
//! |---|---|
//! | `team` | ranks as threads over the worker's transports, and the timing loop |
//! | `links` | time of collectives by size |
//! | `steps` | time of model steps, on one rank and in layouts of several ranks |
//! | `files` | reading and writing the cluster and calibration files |
//!
//! The constants are fitted to single-rank steps. Contention between ranks for processors is fitted to a few steps of
//! layouts with unsliced experts. All other steps, in every layout, are predicted from these fits and the collectives,
//! then measured; the calibration states the resulting error.

mod files;
mod links;
mod steps;
mod team;

use std::path::Path;
use std::time::{Duration, Instant};

use semmoe_planner::calibration::{Accuracy, Calibration, Errors, StepPoint, errors, fit, fit_contention};
use semmoe_planner::cluster::{Cluster, Measured, Sharing};
use semmoe_planner::search::{Question, search};
use semmoe_planner::shape::ModelShape;
use semmoe_planner::step::{Constants, Target, step};
use semmoe_planner::workload::Workload;
use semmoe_tables::Attention;
use semmoe_worker::TransportChoice;
use semmoe_worker::ep::ExpertLayout;
use semmoe_worker::model::ModelConfig;

use super::{Chosen, DEFAULT_WORKLOAD, UnitPlan, parse};
use crate::args::CalibrateArgs;
use crate::commands::print;
use crate::error::CliError;
use crate::progress::{Progress, Steps as _, say};
use steps::{Job, WorkerLayout};
use team::Team;

/// Single-rank steps that the constants are fitted to.
const FITTED: [Job; 13] = [
    job(1, 1, 32),
    job(2, 1, 256),
    job(4, 1, 32),
    job(2, 1, 512),
    job(16, 1, 32),
    job(4, 1, 512),
    job(32, 1, 128),
    job(64, 1, 32),
    job(1, 8, 0),
    job(1, 32, 0),
    job(1, 128, 0),
    job(2, 256, 0),
    job(1, 512, 0),
];
/// Steps that contention between ranks is fitted to, in layouts with unsliced experts.
const CONTENDED: [Job; 3] = [job(4, 1, 128), job(24, 1, 128), job(1, 192, 0)];
/// Held-out steps, predicted in every layout. Sizes are per rank with attention dp, and over all ranks with attention
/// tp.
const HELD_OUT: [Job; 6] =
    [job(3, 1, 96), job(12, 1, 48), job(3, 1, 384), job(40, 1, 24), job(1, 96, 0), job(1, 384, 0)];

const fn job(sequences: usize, tokens: usize, cached: usize) -> Job {
    Job { sequences, tokens, cached }
}

/// All measurements.
struct Findings {
    alone: Vec<StepPoint>,
    tables: Vec<Measured>,
    between: Vec<[f64; 2]>,
    contended: Vec<StepPoint>,
    /// Steps held out from the fits, in every layout.
    layouts: Vec<StepPoint>,
}

pub(super) fn run(args: &CalibrateArgs) -> Result<(), CliError> {
    let text = calibrate(args)?;
    print(&text)
}

/// Measures this machine, writes both files and returns the report.
fn calibrate(args: &CalibrateArgs) -> Result<String, CliError> {
    files::check(&args.out)?;
    let shape = parse(&args.model.join("config.json"), ModelShape::from_config)?;
    let config = ModelConfig::load(&args.model).map_err(CliError::input)?;
    let ranks = ranks(&args.ranks)?;
    let found = measure(args, &config, &ranks)?;
    let most = ranks.last().copied().unwrap_or(1) as u64;
    let read = |described: &str| Cluster::from_toml("the measured cluster", described).map_err(CliError::failed);
    let mut cluster = read(&files::describe(&found.tables, &[], most, args.transport))?;
    let one = of_ranks(&cluster, 1);
    let start = Constants {
        dispatch_bytes: 4.0,
        combine_bytes: 4.0,
        link_bandwidth_share: 1.0,
        collective_seconds: 0.0,
        expert_load_max_over_mean: 1.0,
        scattered_rows: true,
        slowest_group: false,
        ..Constants::uncalibrated()
    };
    let constants = fit(&shape, &one, &start, &found.alone).map_err(CliError::failed)?;
    for ranks in ranks.into_iter().map(|ranks| ranks as u64).filter(|&ranks| ranks > 1) {
        let points: Vec<StepPoint> =
            found.contended.iter().filter(|point| point.layout.gpus() == ranks).copied().collect();
        let contention = fit_contention(&shape, &of_ranks(&cluster, ranks), &constants, &points, ranks);
        cluster = cluster.contended(ranks, contention.map_err(CliError::failed)?);
    }
    // Writes and parses the cluster like a user's file, so the predictions below equal those of `semmoe plan`.
    let described = files::describe(&cluster.measured.collectives, &cluster.gpu.sharing, most, args.transport);
    let cluster = read(&described)?;
    let of = |prefill: bool| -> Result<Errors, CliError> {
        let points: Vec<StepPoint> =
            found.layouts.iter().filter(|point| (point.work.tokens > 1.0) == prefill).copied().collect();
        let cluster = |point: &StepPoint| of_ranks(&cluster, point.layout.gpus());
        errors(&shape, cluster, &constants, &points).map_err(CliError::failed)
    };
    let links =
        (!found.between.is_empty()).then(|| Errors::of(&found.between)).transpose().map_err(CliError::failed)?;
    let calibration = Calibration {
        engine: format!("semmoe worker {}", env!("CARGO_PKG_VERSION")),
        gpu: cluster.gpu.name.clone(),
        source: format!(
            "semmoe plan calibrate: {} steps of one rank and {} of several fitted, {} of layouts of up to {most} ranks \
             held out",
            found.alone.len(),
            found.contended.len(),
            found.layouts.len()
        ),
        constants,
        ttft: of(true)?,
        tpot: of(false)?,
        links,
    };
    files::write(&args.out, &described, &calibration)?;
    report(args, &shape, &cluster, &calibration, &found)
}

/// Measurement time of `up --plan auto`.
const AUTO_SECONDS: f64 = 20.0;
/// The numbers of ranks that `up --plan auto` measures.
const AUTO_RANKS: [u16; 3] = [1, 2, 4];

/// Returns the unit with the fastest responses on this machine according to the calibration in `folder`. Calibrates
/// first if `folder` has no calibration for this machine.
pub(crate) fn for_this_machine(model: &Path, folder: &Path) -> Result<UnitPlan, CliError> {
    let known = || -> Result<(Cluster, Calibration), CliError> {
        let cluster = parse(&folder.join(files::CLUSTER), Cluster::from_toml)?;
        let calibration = parse(&folder.join(files::CALIBRATION), Calibration::from_json)?;
        let here = cluster.gpu.name == files::machine() && calibration.gpu == cluster.gpu.name;
        if here { Ok((cluster, calibration)) } else { Err(CliError::input("measured on another machine")) }
    };
    let (cluster, calibration) = match known() {
        Ok(known) => known,
        Err(_) => {
            let (model, out) = (model.to_owned(), folder.to_owned());
            let (ranks, transport) = (AUTO_RANKS.to_vec(), TransportChoice::Shm);
            calibrate(&CalibrateArgs { model, out, ranks, transport, seconds: AUTO_SECONDS, json: false })?;
            known()?
        }
    };
    let shape = parse(&model.join("config.json"), ModelShape::from_config)?;
    let workload = Workload::from_toml("the default workload", DEFAULT_WORKLOAD).map_err(CliError::input)?;
    let constants = &calibration.constants;
    let mut best: Option<(f64, String, UnitPlan)> = None;
    for ranks in AUTO_RANKS {
        let cluster = of_ranks(&cluster, ranks.into());
        let question = Question { shape: &shape, cluster: &cluster, workload: &workload, constants };
        for candidate in search(&question).map_err(CliError::input)?.ranked {
            let seconds = candidate.at_load.request_seconds;
            if candidate.units > 1 || best.as_ref().is_some_and(|(least, ..)| seconds >= *least) {
                continue;
            }
            // Layouts that the worker cannot run are skipped.
            if let Ok(unit) = Chosen::of(&shape, &candidate, constants, None)?.unit() {
                best = Some((seconds, candidate.layout.name(), unit));
            }
        }
    }
    let (seconds, layout, unit) =
        best.ok_or_else(|| CliError::failed("no layout on this machine can serve the default workload"))?;
    let ranks = unit.ranks;
    say(&format!(
        "plan: {layout} on {ranks} ranks, {seconds:.2} s per request (modelled; {})",
        Accuracy::of(Some(&calibration))
    ));
    Ok(unit)
}

/// Sorts and deduplicates the numbers of ranks.
fn ranks(given: &[u16]) -> Result<Vec<usize>, CliError> {
    let mut ranks: Vec<usize> = given.iter().map(|&ranks| ranks.into()).collect();
    ranks.sort_unstable();
    ranks.dedup();
    if ranks.is_empty() { Err(CliError::input("--ranks is empty")) } else { Ok(ranks) }
}

/// Returns the cluster with only `ranks` ranks in use.
fn of_ranks(cluster: &Cluster, ranks: u64) -> Cluster {
    let mut cluster = cluster.clone();
    cluster.levels.iter_mut().for_each(|level| level.count = ranks);
    cluster
}

/// Returns the worker layouts over `ranks` ranks that fit the model, and reports the rest.
fn layouts(ranks: usize, shape: &ModelShape) -> Vec<WorkerLayout> {
    if ranks == 1 {
        return vec![WorkerLayout::ONE];
    }
    let all = [Attention::Dp, Attention::Tp]
        .into_iter()
        .flat_map(|attention| [ExpertLayout::Ep, ExpertLayout::Tp].map(|experts| (attention, experts)));
    let fits = |layout: &WorkerLayout| match layout.planned().check(shape) {
        Ok(()) => true,
        Err(reason) => {
            say(&format!("{} is not measured: {reason}", layout.planned().name()));
            false
        }
    };
    all.map(|(attention, experts)| WorkerLayout { ranks, attention, experts }).filter(fits).collect()
}

fn measure(args: &CalibrateArgs, config: &ModelConfig, ranks: &[usize]) -> Result<Findings, CliError> {
    let shape = parse(&args.model.join("config.json"), ModelShape::from_config)?;
    let jobs = |jobs: &[Job]| -> Vec<Job> { jobs.iter().filter(|job| job.fits(config)).copied().collect() };
    let (fitted, contended, held_out) = (jobs(&FITTED), jobs(&CONTENDED), jobs(&HELD_OUT));
    let layouts: Vec<WorkerLayout> = ranks.iter().flat_map(|&ranks| layouts(ranks, &shape)).collect();
    let several: Vec<usize> = ranks.iter().copied().filter(|&ranks| ranks > 1).collect();
    let whole = |layout: &&WorkerLayout| layout.ranks > 1 && layout.experts == ExpertLayout::Ep;
    let rounds = fitted.len()
        + several.len() * links::MEASUREMENTS
        + layouts.iter().filter(whole).count() * contended.len()
        + layouts.len() * held_out.len();
    let each = Duration::from_secs_f64(args.seconds / rounds as f64);
    let progress = Progress::start("calibrating", rounds as u64);
    let began = Instant::now();

    progress.message("steps of one rank");
    let alone = steps::alone(&args.model, &fitted, each)?;
    progress.advance(fitted.len() as u64);
    let (mut tables, mut between) = (Vec::new(), Vec::new());
    for &ranks in &several {
        progress.message(&format!("links of {ranks} ranks"));
        let team = Team { ranks, carrier: args.transport, elements: links::ELEMENTS };
        let found = links::measure(team, files::level(args.transport), each)?;
        tables.extend(found.tables);
        between.extend(found.between);
        progress.advance(links::MEASUREMENTS as u64);
    }
    let together = |layout: &WorkerLayout, jobs: &[Job]| {
        progress.message(&layout.planned().name());
        let rows = jobs.iter().map(|job| job.sequences * job.tokens.max(job.cached)).max().unwrap_or(1);
        let elements = layout.ranks * rows * config.hidden;
        let team = Team { ranks: layout.ranks, carrier: args.transport, elements };
        let steps = steps::together(&args.model, *layout, team, jobs, each)?;
        progress.advance(jobs.len() as u64);
        Ok::<_, CliError>(steps)
    };
    let (mut seen, mut unseen) = (Vec::new(), Vec::new());
    for layout in &layouts {
        if whole(&layout) {
            seen.extend(together(layout, &contended)?);
        }
        unseen.extend(together(layout, &held_out)?);
    }
    progress.finish(&format!("{} measurements in {:.0} s", rounds, began.elapsed().as_secs_f64()));
    Ok(Findings { alone, tables, between, contended: seen, layouts: unseen })
}

/// Formats the results, including every predicted step.
fn report(
    args: &CalibrateArgs,
    shape: &ModelShape,
    cluster: &Cluster,
    calibration: &Calibration,
    found: &Findings,
) -> Result<String, CliError> {
    let row = |point: &StepPoint| {
        let cluster = of_ranks(cluster, point.layout.gpus());
        let constants = &calibration.constants;
        let predicted =
            step(&Target { shape, cluster: &cluster, layout: point.layout, constants }, &point.work).total();
        serde_json::json!({
            "ranks": point.layout.gpus(), "layout": point.layout.name(), "sequences": point.work.sequences,
            "tokens": point.work.tokens, "cached": point.work.cached,
            "predicted_ms": predicted * 1e3, "measured_ms": point.seconds * 1e3,
        })
    };
    let rows: Vec<serde_json::Value> = found.layouts.iter().map(row).collect();
    if args.json {
        let document = serde_json::json!({
            "calibration": calibration, "cluster": cluster, "held_out": rows,
            "fitted": found.alone.iter().map(row).collect::<Vec<_>>(),
        });
        return serde_json::to_string_pretty(&document).map_err(CliError::failed);
    }
    let mut text = format!(
        "{:>5}  {:<18} {:>9} {:>6} {:>6}  {:>9} {:>9} {:>7}\n",
        "ranks", "layout", "sequences", "tokens", "cached", "predicted", "measured", "error"
    );
    for row in &rows {
        let number = |key: &str| row[key].as_f64().unwrap_or(0.0);
        let (predicted, measured) = (number("predicted_ms"), number("measured_ms"));
        text.push_str(&format!(
            "{:>5}  {:<18} {:>9} {:>6} {:>6}  {predicted:>6.2} ms {measured:>6.2} ms {:>+6.1}%\n",
            number("ranks"),
            row["layout"].as_str().unwrap_or_default(),
            number("sequences"),
            number("tokens"),
            number("cached"),
            (predicted / measured - 1.0) * 100.0
        ));
    }
    for table in &found.tables {
        if let Some(line) = table.line() {
            text.push_str(&format!(
                "{:?} between {} ranks: {:.1} us + bytes at {:.2} GB/s; knee at {:.0} KB\n",
                table.operator,
                table.ranks,
                line.latency * 1e6,
                1e-9 / line.seconds_per_byte,
                line.knee() / 1e3
            ));
        }
    }
    for Sharing { ranks, slowdown } in &cluster.gpu.sharing {
        text.push_str(&format!("{ranks} ranks that share the processors are {slowdown:.2} times slower\n"));
    }
    text.push_str(&files::accuracy(calibration));
    Ok(text.trim_end().to_owned())
}
