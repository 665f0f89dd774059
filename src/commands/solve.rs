//! `semmoe solve`.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use semmoe_profiler::html::GroupLoads;
use semmoe_solver::{
    Nodes, PaperOptions, SolveError, SolveOptions, SolveProgress, SolveReport, Solved, TokenStrings, WarmStart, solve,
    solve_paper,
};
use semmoe_tables::{Embeddings, ModelInfo, Profile, Provenance, Tables, Trace};
use semmoe_text::{Tokenizer, tokenizer_file};

use super::outcome::{Document, Outcome};
use super::{check_apart, check_output, figures, placement, print_result};
use crate::args::{SolveArgs, SolverArg};
use crate::error::CliError;
use crate::progress::{Progress, Steps as _, say};
use crate::signals::stop_flag;
use crate::stamp::created;

/// Below this mean number of activations per expert and layer, a warning is printed.
const FEW_ACTIVATIONS: f64 = 10.0;

pub(crate) fn run(args: &SolveArgs) -> Result<(), CliError> {
    let profile = Profile::open(&args.profile).map_err(CliError::input)?;
    let trace = args.trace.as_deref().map(|path| same_models_trace(args, &profile, path)).transpose()?;
    check_outputs(args)?;
    let source = format!("solved from profile {}", profile.digest());
    let mut options = SolveOptions::new(args.groups, args.attention, Provenance { source, created: created() });
    options.objective = args.objective;
    options.seed = args.seed;
    options.threads = threads();
    options.token_strings = args.tokenizer.as_deref().map(token_strings).transpose()?;
    let embeddings = |path: &PathBuf| Embeddings::open(path, args.embeddings_tensor.as_deref());
    options.embeddings = args.embeddings.as_ref().map(embeddings).transpose().map_err(CliError::input)?.map(Arc::new);
    options.redundant = args.redundant;
    let given = |named| placement::given(named, profile.model(), args.groups);
    options.placement = args.placement.as_deref().map(given).transpose()?;
    options.warm_start = warm_start(args, &profile)?;
    options.nodes = args.nodes.map(|nodes| Nodes { nodes, inter_cost: args.inter_cost });
    options.gating_groups = args.gating_groups;
    options.pad = args.pad;
    options.hold_out = args.hold_out;
    let stop = Stop::new(args.time_limit, Some(stop_flag()?));
    let solved = match args.solver {
        SolverArg::Exact => solve_with_progress(&profile, trace.as_ref(), &options, &stop)?,
        SolverArg::Paper => {
            let paper = PaperOptions::default();
            under_progress(&stop, |step| solve_paper(&profile, trace.as_ref(), &options, &paper, step))?
        }
    };
    if solved.report.stopped {
        say("solving: stopped early, writing the best result so far");
    }
    let digest = solved.tables.write(&args.out).map_err(CliError::failed)?;
    if let Some(path) = &args.report {
        write_report(path, &solved.report)?;
    }
    warn_of_few_tokens(&args.profile, &profile);
    let outcome = Outcome::of_solve(&solved.report, &GroupLoads::of_profile(&profile, &solved.tables));
    let verdict = outcome.verdict(Some(&solved.report), next(args, &solved.report));
    let (out, figures) = (Some(args.out.as_path()), &solved.report);
    let document = Document { out, outcome: Some(&outcome), verdict: &verdict, figures };
    let all = if args.verbose { figures::lines(&solved.report)? } else { String::new() };
    print_result(args.output, "solve", &document, || {
        let (out, note) = (args.out.display(), &solved.report.held_out.note);
        format!("{out}: digest {digest}\nheld out: {note}\n{all}\n{outcome}\n\n{verdict}")
    })
}

/// Returns the commands to suggest next: export good tables to an engine; otherwise evaluate, or record more data.
fn next(args: &SolveArgs, report: &SolveReport) -> [String; 2] {
    let tables = args.out.display();
    let good = format!("semmoe tables export --tables {tables} --format sglang --out experts.json");
    let other = match &report.held_out.figures {
        Some(_) => "semmoe profile record --engine sglang --url http://127.0.0.1:30000 --model-config DIR --prompts MORE.jsonl --out more.trace.safetensors".to_owned(),
        None => format!("semmoe evaluate --tables {tables} --trace OTHER.trace.safetensors"),
    };
    [good, other]
}

/// Warns if the profile has so few tokens that the placement is mostly noise.
fn warn_of_few_tokens(path: &Path, profile: &Profile) {
    let (tokens, model) = (profile.total_tokens(), profile.model());
    let each = tokens as f64 * f64::from(model.top_k) / f64::from(model.num_experts);
    if each < FEW_ACTIVATIONS {
        let counted = if tokens == 1 { "1 token".to_owned() } else { format!("{tokens} tokens") };
        say(&format!(
            "warning: {} counts {counted}, so each expert was chosen {each:.1} times per layer on average and its placement is \
             mostly noise; record a few thousand prompts",
            path.display()
        ));
    }
}

/// Checks that the profile and another file belong to one model.
fn check_same_model(args: &SolveArgs, profile: &Profile, path: &Path, model: &ModelInfo) -> Result<(), CliError> {
    profile
        .model()
        .check_compatible(model)
        .map_err(|error| CliError::input(format!("{} and {} are for {error}", args.profile.display(), path.display())))
}

fn same_models_trace(args: &SolveArgs, profile: &Profile, path: &Path) -> Result<Trace, CliError> {
    let trace = Trace::open(path).map_err(CliError::input)?;
    check_same_model(args, profile, path, trace.model())?;
    Ok(trace)
}

/// Loads the tables to start from, if any.
fn warm_start(args: &SolveArgs, profile: &Profile) -> Result<Option<WarmStart>, CliError> {
    let Some(path) = &args.warm_start else { return Ok(None) };
    let tables = Tables::open(path).map_err(CliError::input)?;
    check_same_model(args, profile, path, tables.model())?;
    Ok(Some(WarmStart { tables: Arc::new(tables), migration_cost: args.migration_cost }))
}

/// Checks that the outputs can be written before solving.
fn check_outputs(args: &SolveArgs) -> Result<(), CliError> {
    let optional = [&args.trace, &args.tokenizer, &args.embeddings, &args.placement, &args.warm_start];
    let inputs = || [&args.profile].into_iter().chain(optional.into_iter().flatten());
    check_output(&args.out, inputs())?;
    match &args.report {
        // The report may be written to a pipe or a terminal.
        Some(report) if std::fs::metadata(report).is_ok_and(|there| !there.is_file() && !there.is_dir()) => Ok(()),
        Some(report) => check_apart(report, &args.out).and_then(|()| check_output(report, inputs())),
        None => Ok(()),
    }
}

/// Loads a tokenizer's token strings; `path` is a `tokenizer.json` or its directory.
pub(crate) fn token_strings(path: &Path) -> Result<Arc<TokenStrings>, CliError> {
    let file = tokenizer_file(path);
    let tokenizer = Tokenizer::from_file(&file).map_err(CliError::input)?;
    Ok(Arc::new(TokenStrings::new(tokenizer.pieces(), Some(tokenizer.sha256().to_owned()))))
}

/// Conditions for stopping a solve early.
#[derive(Debug, Default)]
pub(crate) struct Stop {
    deadline: Option<Instant>,
    asked: Option<Arc<AtomicBool>>,
}

impl Stop {
    fn new(time_limit: Option<Duration>, asked: Option<Arc<AtomicBool>>) -> Self {
        Self { deadline: time_limit.and_then(|limit| Instant::now().checked_add(limit)), asked }
    }

    fn now(&self) -> ControlFlow<()> {
        let late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let asked = self.asked.as_ref().is_some_and(|asked| asked.load(Ordering::Relaxed));
        if late || asked { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

/// Solves while showing a progress bar.
pub(crate) fn solve_with_progress(
    profile: &Profile,
    trace: Option<&Trace>,
    options: &SolveOptions,
    stop: &Stop,
) -> Result<Solved, CliError> {
    under_progress(stop, |step| solve(profile, trace, options, step))
}

type Step<'a> = &'a mut dyn FnMut(SolveProgress) -> ControlFlow<()>;

fn under_progress(stop: &Stop, solve: impl FnOnce(Step<'_>) -> Result<Solved, SolveError>) -> Result<Solved, CliError> {
    let progress = Progress::start("solving", 0);
    let solved = solve(&mut |step| {
        progress.set_total(step.starts as u64);
        progress.set_done(step.starts_done as u64);
        if let Some(best) = step.best_lar {
            progress.message(&format!("best local rate {best:.4}"));
        }
        stop.now()
    })
    .map_err(CliError::input)?;
    progress.finish(&format!("local rate {:.4} on the input", solved.report.lar));
    Ok(solved)
}

/// Number of solver threads, which does not affect the result.
pub(crate) fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn write_report(path: &Path, report: &SolveReport) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(report).map_err(|error| CliError::cannot_write(path, error))?;
    match std::fs::metadata(path) {
        // Pipes and terminals are written directly, as a rename would replace them.
        Ok(there) if !there.is_file() => {
            std::fs::write(path, text).map_err(|error| CliError::cannot_write(path, error))
        }
        _ => semmoe_tables::export::write(&text, path).map_err(CliError::failed),
    }
}
