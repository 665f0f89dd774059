//! `semmoe plan`: files to the planner, its answer to the terminal.

mod page;

use std::path::Path;

use semmoe_engines::metrics::Sample;
use semmoe_planner::advice::{NoSwitch, Switching, replication, switching};
use semmoe_planner::affinity::{Rates, StepProfile, gain};
use semmoe_planner::calibration::{Accuracy, Calibration};
use semmoe_planner::cluster::Cluster;
use semmoe_planner::report::{Answer, Judged};
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
    let answer = Answer::new(&question, &plan, accuracy, affinity);
    if let Some(html) = &args.html {
        page::write(html, &shape.architecture, &answer)?;
    }
    let extras = Extras::of(&question, &plan)?;
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

/// What affinity gains in the best plan with whole experts, in decoding and in prefill, or in a step as measured.
fn affinity(
    args: &PlanArgs,
    question: &Question<'_>,
    plan: &Plan,
    accuracy: &Accuracy,
) -> Result<Vec<Judged>, CliError> {
    let Some(named) = &args.affinity else { return Ok(Vec::new()) };
    let Some(best) = plan.ranked.iter().find(has_whole_experts).or(plan.ranked.first()) else { return Ok(Vec::new()) };
    let (after, random) = rate(named)?;
    let before = args.lar_before.or(random).unwrap_or(1.0 / best.layout.expert_ep.max(2) as f64);
    let judge = |step: &'static str, profile: &StepProfile, factor: f64| {
        let rates = Rates { before, after, error: args.lar_error, factor };
        let layout = format!("{} x {}", best.units, best.layout.name());
        gain(profile, &rates).map(|gain| Judged { step, layout, gain }).map_err(CliError::input)
    };
    if let Some((step, communication)) = args.step_ms.zip(args.communication_ms) {
        let latency = args.latency_ms.min(communication);
        // With overlap the computation is at most the step.
        let compute = if args.overlap { step } else { step - communication };
        let [compute, bytes, latency] = [compute, communication - latency, latency].map(|time| time / 1e3);
        let profile = StepProfile { compute, bytes, latency, experts: 0.0, overlap: args.overlap };
        return Ok(vec![judge("the measured step", &profile, 1.0)?]);
    }
    let Question { shape, cluster, constants, .. } = *question;
    let target = Target { shape, cluster, layout: best.layout, constants };
    let load = question.workload.load(best.at_load.concurrency);
    let groups = best.layout.attention_dp as f64;
    let works =
        [("decoding", decoding(best.at_load.concurrency.max(groups), &load)), ("prefill", prompts(groups, &load))];
    let judged = works
        .into_iter()
        .map(|(step, work)| judge(step, &StepProfile::predicted(&target, &work, args.overlap), accuracy.factor()));
    judged.collect()
}

/// Whether ranks have experts of their own, all of their rows.
fn has_whole_experts(plan: &&Candidate) -> bool {
    plan.layout.expert_tp == 1 && plan.layout.expert_ep > 1
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

/// What goes with the plan: layouts that could be switched, and replicas.
struct Extras {
    switching: Option<Result<Switching, NoSwitch>>,
    replication: Option<semmoe_planner::advice::Replication>,
}

impl Extras {
    fn of(question: &Question<'_>, plan: &Plan) -> Result<Self, CliError> {
        let Some(best) = plan.ranked.first() else {
            return Ok(Self { switching: None, replication: None });
        };
        let replication = match plan.ranked.iter().find(has_whole_experts) {
            Some(plan) => replication(question, plan).map_err(CliError::input)?,
            None => None,
        };
        let switching = Some(switching(question, best.at_load.concurrency));
        Ok(Self { switching, replication })
    }

    fn json(&self) -> Value {
        let switching = self.switching.as_ref().map(|found| match found {
            Ok(found) => json!(found),
            Err(error) => json!({ "impossible": error.to_string() }),
        });
        json!({ "switching": switching, "replication": self.replication })
    }

    fn text(&self) -> String {
        let mut text = String::new();
        match &self.switching {
            Some(Ok(found)) => text.push_str(&switching_text(found)),
            Some(Err(error)) => text.push_str(&format!("no switching between TP and EP: {error}\n")),
            None => {}
        }
        if let Some(found) = self.replication.as_ref().filter(|found| found.redundant_slots > 0) {
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
