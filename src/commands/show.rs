//! `semmoe profile show`.

use std::io::{BufRead, BufReader, Read};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use semmoe_profiler::html::{Page, RatePoint, write_page};
use semmoe_profiler::show::{Input, Study, study};
use semmoe_solver::{EvalInput, EvalOptions, SolveOptions, evaluate, solve};
use semmoe_tables::{Attention, Profile, Tables};
use semmoe_text::Tokenizer;
use serde_json::Value;

use super::profile::failure;
use super::{check_output, print, print_json};
use crate::args::ShowArgs;
use crate::error::CliError;
use crate::progress::Progress;

/// The longest line of a file of topics; prompts may be on it.
const MAX_LINE_BYTES: u64 = 16 << 20;
/// Starts of the solves for the page: what more of them bring is not seen in a picture.
const STARTS: u32 = 2;

pub(crate) fn run(args: &ShowArgs) -> Result<(), CliError> {
    if let Some(html) = &args.html {
        let optional = [&args.held_out, &args.tokenizer, &args.topics];
        let inputs = optional.into_iter().flatten().chain(&args.tables).chain([&args.file]).map(PathBuf::as_path);
        check_output(html, &inputs.collect::<Vec<_>>())?;
    }
    let input = Input::open(&args.file).map_err(failure)?;
    let held_out = args.held_out.as_deref().map(Input::open).transpose().map_err(failure)?;
    let study = study(&input, held_out.as_ref()).map_err(|error| match &args.held_out {
        Some(path) => CliError::input(format!("{} and {}: {error}", args.file.display(), path.display())),
        None => failure(error),
    })?;
    if let Some(html) = &args.html {
        write_html(html, args, &input, &study)?;
    }
    if args.json { print_json(&study) } else { print(&study.to_string()) }
}

fn write_html(html: &Path, args: &ShowArgs, input: &Input, study: &Study) -> Result<(), CliError> {
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
        Err(_) => Err(CliError::input(format!(
            "--layer is {id}, expected one of the layers with experts: {:?}",
            model.layer_ids
        ))),
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
    let page = Page {
        placement: tables.first().map(Tables::placement),
        token_texts: args.tokenizer.as_deref().map(token_texts).transpose()?.unwrap_or_default(),
        topics,
        rates: rates(args, input, study, &tables)?,
        layer: layer.transpose()?,
    };
    write_page(html, study, &page).map_err(failure)
}

/// What every token id stands for; one without a text is shown by its id.
fn token_texts(path: &Path) -> Result<Vec<String>, CliError> {
    let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
    let tokenizer = Tokenizer::from_file(&path).map_err(CliError::input)?;
    let text = |id: u32| match tokenizer.decode_with(&[id], false) {
        // Bytes that are a part of a character only.
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
        let bad = |cause: String| CliError::input(format!("{shown} line {}: {cause}", topics.len() + 1));
        if read as u64 > MAX_LINE_BYTES {
            return Err(bad(format!("longer than {MAX_LINE_BYTES} bytes")));
        }
        if read == 0 {
            return Ok(topics);
        }
        let value: Value = serde_json::from_slice(&line).map_err(|error| bad(format!("not JSON: {error}")))?;
        let topic = value["domain"].as_str().or(value["topic"].as_str());
        topics.push(topic.ok_or_else(|| bad("neither \"domain\" nor \"topic\" is a text".into()))?.to_owned());
    }
}

/// Of the tables given, and of quick solves.
fn rates(args: &ShowArgs, input: &Input, study: &Study, tables: &[Tables]) -> Result<Vec<RatePoint>, CliError> {
    let (counted, judged): (&Profile, &Profile) = match (&study.parts, input) {
        (Some((counted, judged)), _) => (counted, judged),
        (None, Input::Profile(profile)) => (profile, profile),
        (None, Input::Trace(_)) => return Ok(Vec::new()),
    };
    let mut points = Vec::new();
    for tables in tables {
        // Nobody says what these were solved on.
        points.push(rate(tables, judged, args.held_out.is_some())?);
    }
    if !args.groups.is_empty() {
        let progress = Progress::start("solving", args.groups.len() as u64);
        for groups in &args.groups {
            let provenance = counted.provenance().clone();
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            let options = SolveOptions {
                starts: STARTS,
                threads,
                bounds: None,
                ..SolveOptions::new(*groups, Attention::Dp, provenance)
            };
            let solved = solve(counted, None, &options, &mut |_| ControlFlow::Continue(())).map_err(CliError::input)?;
            points.push(rate(&solved.tables, judged, study.parts.is_some())?);
            progress.advance(1);
        }
        progress.finish(&format!("{} numbers of groups", args.groups.len()));
    }
    Ok(points)
}

fn rate(tables: &Tables, judged: &Profile, held_out: bool) -> Result<RatePoint, CliError> {
    let evaluation = evaluate(tables, EvalInput::Profile(judged), &EvalOptions::default()).map_err(CliError::input)?;
    Ok(RatePoint { groups: tables.groups(), rate: evaluation.lar, random: evaluation.lar_random, held_out })
}
