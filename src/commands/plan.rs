//! `semmoe plan`: files to the planner, its answer to the terminal.

mod page;

use std::path::Path;

use semmoe_engines::metrics::Sample;
use semmoe_planner::advice::{NoSwitch, Switching, replication, switching};
use semmoe_planner::affinity::{Gain, Rates, StepProfile, gain};
use semmoe_planner::calibration::{Accuracy, Calibration};
use semmoe_planner::cluster::Cluster;
use semmoe_planner::report::Answer;
use semmoe_planner::search::{Candidate, Plan, Question, search};
use semmoe_planner::shape::{Dtype, ModelShape, Precision};
use semmoe_planner::step::{Constants, Target, decoding, prompts};
use semmoe_planner::switching::Crossing;
use semmoe_planner::workload::{Lengths, Workload};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{check_output, print, print_json, read_text};
use crate::args::PlanArgs;
use crate::error::CliError;

/// Of a configuration, a cluster, a workload, a calibration.
const MAX_INPUT_BYTES: u64 = 4 << 20;
/// Of a trace of lengths, of metrics.
const MAX_TRACE_BYTES: u64 = 1 << 30;

/// What is planned for where no workload is given.
const DEFAULT_WORKLOAD: &str = "requests_per_second = 1\ninput_tokens = 1024\noutput_tokens = 256\n";

pub(crate) fn run(args: &PlanArgs) -> Result<(), CliError> {
    let optional = [&args.workload, &args.calibration, &args.lengths].into_iter().flatten();
    let inputs: Vec<&Path> = optional.chain([&args.model, &args.cluster]).map(std::path::PathBuf::as_path).collect();
    if let Some(html) = &args.html {
        check_output(html, &inputs)?;
    }
    let shape = shape(args)?;
    let cluster = parse(&args.cluster, Cluster::from_toml)?;
    let workload = workload(args)?;
    let calibration = args.calibration.as_deref().map(|path| parse(path, Calibration::from_json)).transpose()?;
    if let Some(found) = calibration.as_ref().filter(|found| found.gpu != cluster.gpu.name) {
        let (fitted, given) = (&found.gpu, &cluster.gpu.name);
        return Err(CliError::input(format!("the calibration was fitted on {fitted}, and the cluster has {given}")));
    }
    let constants = calibration.as_ref().map_or_else(Constants::uncalibrated, |found| found.constants);
    let accuracy = Accuracy::of(calibration.as_ref());
    let question = Question { shape: &shape, cluster: &cluster, workload: &workload, constants: &constants };
    let plan = search(&question).map_err(CliError::input)?;
    let affinity = affinity(args, &question, &plan, &accuracy)?;
    let gains = affinity.as_ref().map(|(_, gains)| *gains);
    let answer = Answer::new(&question, &plan, accuracy, gains);
    if let Some(html) = &args.html {
        page::write(html, &shape.architecture, &answer)?;
    }
    let extras = Extras::of(&question, &plan, affinity.map(|(layout, _)| layout))?;
    if args.json {
        let mut document = serde_json::to_value(&answer).map_err(CliError::failed)?;
        document["extras"] = extras.json();
        print_json(&document)?;
    } else {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = answer.write(args.top, args.explain, &mut text);
        text.push_str(&extras.text());
        print(text.trim_end())?;
    }
    match plan.ranked.is_empty() {
        true => Err(CliError::failed("no strategy serves the load: the answer has the reasons")),
        false => Ok(()),
    }
}

/// Reads a file of the planner's, named by its path in errors.
fn parse<T>(path: &Path, read: impl Fn(&str, &str) -> Result<T, semmoe_planner::PlanError>) -> Result<T, CliError> {
    let text = read_text(path, "file", MAX_INPUT_BYTES)?;
    read(&path.display().to_string(), &text).map_err(CliError::input)
}

fn shape(args: &PlanArgs) -> Result<ModelShape, CliError> {
    let path = if args.model.is_dir() { args.model.join("config.json") } else { args.model.clone() };
    let mut shape = parse(&path, ModelShape::from_config)?;
    if let Some(weights) = args.weights {
        shape.precision = Precision { cache: shape.precision.cache, ..Precision::uniform(weights) };
    }
    match args.cache {
        Some(cache @ (Dtype::Bf16 | Dtype::Fp8)) => shape.precision.cache = cache,
        Some(other) => return Err(CliError::input(format!("--cache is {}, expected bf16 or fp8", other.name()))),
        None => {}
    }
    Ok(shape)
}

/// One line of Mooncake's traces.
#[derive(Deserialize)]
struct TraceLine {
    input_length: u64,
    output_length: u64,
}

fn workload(args: &PlanArgs) -> Result<Workload, CliError> {
    let mut workload = match &args.workload {
        Some(path) => parse(path, Workload::from_toml)?,
        None => Workload::from_toml("the default workload", DEFAULT_WORKLOAD).map_err(CliError::input)?,
    };
    let Some(path) = &args.lengths else { return Ok(workload) };
    let text = read_text(path, "lengths", MAX_TRACE_BYTES)?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let lengths: Vec<TraceLine> = lines
        .map(|(at, line)| {
            serde_json::from_str(line)
                .map_err(|error| CliError::input(format!("{} line {}: {error}", path.display(), at + 1)))
        })
        .collect::<Result<_, _>>()?;
    let of = |length: fn(&TraceLine) -> u64| Lengths::of_trace(&lengths.iter().map(length).collect::<Vec<_>>());
    match (of(|line| line.input_length), of(|line| line.output_length)) {
        (Some(input), Some(output)) => (workload.input, workload.output) = (input, output),
        _ => return Err(CliError::input(format!("{} has no requests", path.display()))),
    }
    Ok(workload)
}

/// The best plan whose ranks send each other tokens, and its gains in decoding and in prefill.
fn affinity(
    args: &PlanArgs,
    question: &Question<'_>,
    plan: &Plan,
    accuracy: &Accuracy,
) -> Result<Option<(String, [Gain; 2])>, CliError> {
    let Some(named) = &args.affinity else { return Ok(None) };
    let sends = |plan: &&Candidate| plan.layout.exchange_group().size > 1;
    let Some(best) = plan.ranked.iter().find(sends).or(plan.ranked.first()) else { return Ok(None) };
    let (after, random) = rate(named)?;
    let before = args.lar_before.or(random).unwrap_or(1.0 / best.layout.expert_ep.max(2) as f64);
    let target =
        Target { shape: question.shape, cluster: question.cluster, layout: best.layout, constants: question.constants };
    let load = question.workload.load(best.at_load.concurrency);
    let works = [
        decoding(best.at_load.concurrency.max(best.layout.attention_dp as f64), &load),
        prompts(best.layout.attention_dp as f64, &load),
    ];
    let measured = args.step_ms.zip(args.communication_ms);
    let gains = works.map(|work| {
        let modelled = StepProfile::predicted(&target, &work, args.overlap);
        let (profile, factor) = match measured {
            None => (modelled, accuracy.factor()),
            // With overlap a step as long as its communication leaves the computation unknown: it is at most the step.
            Some((step, communication)) => {
                let compute = if args.overlap { step } else { step - communication };
                let fixed = modelled.latency / (modelled.latency + modelled.bytes).max(f64::MIN_POSITIVE);
                let [bytes, latency] = [1.0 - fixed, fixed].map(|share| communication / 1e3 * share);
                (StepProfile { compute: compute / 1e3, bytes, latency, ..modelled }, 1.0)
            }
        };
        gain(&profile, &Rates { before, after, error: args.lar_error, factor }).map_err(CliError::input)
    });
    let [decode, prefill] = gains;
    Ok(Some((format!("{} x {}", best.units, best.layout.name()), [decode?, prefill?])))
}

/// The rate that `--affinity` names, and that of random ranks if it is known.
fn rate(named: &str) -> Result<(f64, Option<f64>), CliError> {
    if let Ok(rate) = named.parse() {
        return Ok((rate, None));
    }
    let text = read_text(Path::new(named), "local activation rate", MAX_TRACE_BYTES)?;
    if let Ok(evaluation) = serde_json::from_str::<Value>(&text) {
        let rate = evaluation["lar"].as_f64();
        let rate = rate.ok_or_else(|| CliError::input(format!("{named}: `lar` is missing, expected a number")))?;
        return Ok((rate, evaluation["lar_random"].as_f64()));
    }
    let samples = text.lines().filter_map(Sample::parse).filter(|sample| sample.name == "semmoe_observed_lar");
    let rates: Vec<f64> = samples.map(|sample| sample.value).filter(|value| value.is_finite()).collect();
    if rates.is_empty() {
        let expected = "the output of `semmoe evaluate --json`, or metrics with semmoe_observed_lar";
        return Err(CliError::input(format!("{named} has no local activation rate, expected {expected}")));
    }
    Ok((rates.iter().sum::<f64>() / rates.len() as f64, None))
}

/// What goes with the plan: layouts that could be switched, replicas, and which plan the gain of affinity is about.
struct Extras {
    switching: Option<Result<Switching, NoSwitch>>,
    replication: Option<semmoe_planner::advice::Replication>,
    affinity_layout: Option<String>,
}

impl Extras {
    fn of(question: &Question<'_>, plan: &Plan, affinity_layout: Option<String>) -> Result<Self, CliError> {
        let Some(best) = plan.ranked.first() else {
            return Ok(Self { switching: None, replication: None, affinity_layout });
        };
        let whole = |plan: &&Candidate| plan.layout.expert_tp == 1 && plan.layout.expert_ep > 1;
        let replication = match plan.ranked.iter().find(whole) {
            Some(plan) => replication(question, plan).map_err(CliError::input)?,
            None => None,
        };
        let switching = Some(switching(question, best.at_load.concurrency));
        Ok(Self { switching, replication, affinity_layout })
    }

    fn json(&self) -> Value {
        let switching = self.switching.as_ref().map(|found| match found {
            Ok(found) => json!(found),
            Err(error) => json!({ "impossible": error.to_string() }),
        });
        json!({ "switching": switching, "replication": self.replication, "affinity_layout": self.affinity_layout })
    }

    fn text(&self) -> String {
        let mut text = String::new();
        if let Some(layout) = &self.affinity_layout {
            text.push_str(&format!("affinity is judged for {layout}\n"));
        }
        match &self.switching {
            Some(Ok(found)) => text.push_str(&switching_text(found)),
            Some(Err(error)) => text.push_str(&format!("no switching between TP and EP: {error}\n")),
            None => {}
        }
        if let Some(found) = &self.replication {
            let (resident, slots) = (&found.resident, found.redundant_slots);
            text.push_str(&format!(
                "replicas: {slots} more slots a layer (domains {:?}, outermost first) would cut a decoding layer's exchange and attention \
                 from {:.0} to {:.0} us\n",
                resident.domains,
                resident.ep_seconds * 1e6,
                resident.seconds * 1e6
            ));
        }
        text
    }
}

fn switching_text(found: &Switching) -> String {
    let crossing = match found.crossing {
        Crossing::At(sequences) => format!("slices are faster below {sequences:.0} requests in flight"),
        Crossing::AboveAll => "slices are faster at every load, so there is nothing to switch".to_owned(),
        Crossing::BelowAll => "whole experts are faster at every load, so there is nothing to switch".to_owned(),
    };
    format!(
        "switching {} GPUs between TP and EP: {crossing}; a switch takes {:.0} ms ({:.0} ms of it experts) and {:.1}% more memory for \
         experts\n",
        found.gpus,
        found.seconds * 1e3,
        found.weight_seconds * 1e3,
        found.memory_overhead * 100.0
    )
}
