//! `semmoe profile show`.

use std::fmt::Display;
use std::io::{BufRead, BufReader, Read};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use semmoe_profiler::Verdict;
use semmoe_profiler::html::{Page, RateKind, RatePoint, write_page};
use semmoe_profiler::show::{Input, Study, study};
use semmoe_profiler::split;
use semmoe_solver::{EvalInput, EvalOptions, SolveOptions, Unit, evaluate, solve};
use semmoe_tables::{Attention, Profile, Tables, Trace};
use semmoe_text::{Tokenizer, tokenizer_file};
use serde_json::Value;

use super::outcome::Document;
use super::profile::failure;
use super::{check_output, print_result};
use crate::args::ShowArgs;
use crate::error::CliError;
use crate::progress::{Progress, Steps as _};

/// Maximum length of a line in a topics file, whose lines may include prompts.
const MAX_LINE_BYTES: u64 = 16 << 20;
/// Number of starts per solve for the page; more would make no visible difference.
const STARTS: u32 = 2;

pub(crate) fn run(args: &ShowArgs) -> Result<(), CliError> {
    if let Some(html) = &args.html {
        let optional = [&args.held_out, &args.tokenizer, &args.topics];
        check_output(html, optional.into_iter().flatten().chain(&args.tables).chain([&args.file]))?;
    }
    let input = Input::open(&args.file).map_err(failure)?;
    let held_out = args.held_out.as_deref().map(Input::open).transpose().map_err(failure)?;
    let study = study(&input, held_out.as_ref()).map_err(|error| match &args.held_out {
        Some(path) => CliError::input(format!("{} and {}: {error}", args.file.display(), path.display())),
        None => failure(error),
    })?;
    let verdict = study.verdict(&args.file.display().to_string());
    if let Some(html) = &args.html {
        write_html(html, args, &input, held_out.as_ref(), &study, &verdict)?;
    }
    let document = Document { out: None, outcome: None, verdict: &verdict, figures: &study };
    print_result(args.output, "profile show", &document, || format!("{study}\n\n{verdict}"))
}

fn write_html(
    html: &Path,
    args: &ShowArgs,
    input: &Input,
    held_out: Option<&Input>,
    study: &Study,
    verdict: &Verdict,
) -> Result<(), CliError> {
    let model = input.model();
    let open = |path: &PathBuf| {
        let tables = Tables::open(path).map_err(CliError::input)?;
        let differ = |error| CliError::input(format!("{} and {}: {error}", path.display(), args.file.display()));
        tables.model().check_compatible(model).map_err(differ)?;
        Ok(tables)
    };
    let tables = args.tables.iter().map(open).collect::<Result<Vec<Tables>, CliError>>()?;
    let layer = args.layer.map(|id| match model.layer_ids.binary_search(&id) {
        Ok(at) => Ok(at),
        Err(_) => {
            Err(CliError::input(format!("--layer is {id}, expected one of the MoE layers: {:?}", model.layer_ids)))
        }
    });
    let topics = args.topics.as_deref().map(read_topics).transpose()?;
    let topics = match (&topics, input) {
        (None, _) => None,
        (Some(topics), Input::Trace(trace)) => Some((trace, topics.as_slice())),
        (Some(_), Input::Profile(_)) => {
            return Err(CliError::input(format!(
                "--topics: {} is a profile, which has no requests, expected a trace",
                args.file.display()
            )));
        }
    };
    let halves = match (input, held_out) {
        (Input::Trace(trace), None) => Some(split(trace, 0.5).map_err(failure)?),
        _ => None,
    };
    let page = Page {
        tables: tables.first(),
        token_texts: args.tokenizer.as_deref().map(token_texts).transpose()?.unwrap_or_default(),
        topics,
        rates: rates(args, &Parts::of(held_out, study, halves.as_ref())?, &tables)?,
        layer: layer.transpose()?,
        verdict: Some(verdict.clone()),
    };
    write_page(html, study, &page).map_err(failure)
}

/// Returns the text of every token id, or the id itself for tokens without text.
fn token_texts(path: &Path) -> Result<Vec<String>, CliError> {
    let tokenizer = Tokenizer::from_file(&tokenizer_file(path)).map_err(CliError::input)?;
    let text = |id: u32| match tokenizer.decode_with(&[id], false) {
        // U+FFFD means that the token's bytes are only part of a character.
        Ok(text) if !text.is_empty() && !text.contains('\u{fffd}') => text,
        _ => tokenizer.id_to_token(id).unwrap_or_else(|| format!("id {id}")),
    };
    Ok((0..tokenizer.vocab_size()).map(text).collect())
}

/// The topic of each line.
fn read_topics(path: &Path) -> Result<Vec<String>, CliError> {
    let shown = path.display();
    let io = |error: std::io::Error| CliError::input(format!("cannot read {shown}: {error}"));
    let mut reader = BufReader::new(std::fs::File::open(path).map_err(io)?);
    let mut topics = Vec::new();
    loop {
        let mut line = Vec::new();
        let read = reader.by_ref().take(MAX_LINE_BYTES + 1).read_until(b'\n', &mut line).map_err(io)?;
        let bad = |cause: &dyn Display| CliError::input(format!("{shown} line {}: {cause}", topics.len() + 1));
        if read as u64 > MAX_LINE_BYTES {
            return Err(bad(&format_args!("longer than {MAX_LINE_BYTES} bytes")));
        }
        if read == 0 {
            return Ok(topics);
        }
        let value: Value = serde_json::from_slice(&line).map_err(|error| bad(&format_args!("not JSON: {error}")))?;
        let topic = value["domain"].as_str().or(value["topic"].as_str());
        topics.push(topic.ok_or_else(|| bad(&"neither \"domain\" nor \"topic\" is a string"))?.to_owned());
    }
}

/// The data to solve from and the data to evaluate tables on: requests if the files contain any.
struct Parts<'a> {
    counted: &'a Profile,
    counted_requests: Option<&'a Trace>,
    judged: EvalInput<'a>,
    held_out: bool,
}

impl<'a> Parts<'a> {
    /// `halves` are the two halves of a trace that is evaluated on itself.
    fn of(held_out: Option<&'a Input>, study: &'a Study, halves: Option<&'a (Trace, Trace)>) -> Result<Self, CliError> {
        let Some((counted, others)) = &study.parts else {
            let judged = EvalInput::Profile(&study.whole);
            return Ok(Self { counted: &study.whole, counted_requests: None, judged, held_out: false });
        };
        let judged = match (halves, held_out) {
            (Some((_, judged)), _) | (None, Some(Input::Trace(judged))) => EvalInput::Trace(judged),
            _ => EvalInput::Profile(others),
        };
        Ok(Self { counted, counted_requests: halves.map(|(solved, _)| solved), judged, held_out: true })
    }

    /// Returns the tables' local activation rate: by requests if there are any and the tables route requests.
    fn rate(&self, tables: &Tables, kind: RateKind, held_out: bool) -> Result<RatePoint, CliError> {
        let judged = evaluate(tables, self.judged, &EvalOptions::default()).map_err(CliError::input)?;
        let (groups, by_requests) = (tables.groups(), judged.unit == Unit::Request);
        Ok(RatePoint { groups, rate: judged.lar, random: judged.lar_random, by_requests, held_out, kind })
    }
}

/// Returns the rates of the given tables and of quick solves.
fn rates(args: &ShowArgs, parts: &Parts<'_>, tables: &[Tables]) -> Result<Vec<RatePoint>, CliError> {
    // It is unknown whether the given tables were solved from this data, unless the user passes a held-out file.
    let given = tables.iter().map(|tables| parts.rate(tables, RateKind::Given, args.held_out.is_some()));
    let mut points = given.collect::<Result<Vec<_>, _>>()?;
    if args.groups.is_empty() {
        return Ok(points);
    }
    let progress = Progress::start("solving", args.groups.len() as u64);
    for groups in &args.groups {
        let options = SolveOptions {
            starts: STARTS,
            threads: super::solve::threads(),
            bounds: None,
            hold_out: 0.0,
            ..SolveOptions::new(*groups, Attention::Dp, parts.counted.provenance().clone())
        };
        let solved = solve(parts.counted, parts.counted_requests, &options, &mut |_| ControlFlow::Continue(()));
        points.push(parts.rate(&solved.map_err(CliError::input)?.tables, RateKind::Solved, parts.held_out)?);
        progress.advance(1);
    }
    progress.finish(&format!("{} numbers of groups", args.groups.len()));
    Ok(points)
}
