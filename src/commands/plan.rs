//! `semmoe plan`: passes files to the planner and prints its answer.

mod affinity;
mod calibrate;
mod chosen;
mod page;
mod units;

use std::path::Path;

use semmoe_planner::advice::{Replication, ResidentDomains, replication, resident_domains};
use semmoe_planner::affinity::WORTH;
use semmoe_planner::calibration::{Accuracy, Calibration};
use semmoe_planner::cluster::Cluster;
use semmoe_planner::fitted::fitted;
use semmoe_planner::layout::Layout;
use semmoe_planner::report::Answer;
use semmoe_planner::search::{Candidate, Plan, Question, search};
use semmoe_planner::shape::{Dtype, ModelShape, Precision};
use semmoe_planner::step::Constants;
use semmoe_planner::switching::{Crossing, NoSwitch, SwitchUnit, Switching, switching};
use semmoe_planner::units::{GroupSwitch, UnitMix, group_switches, unit_mix};
use semmoe_planner::workload::Workload;
use serde_json::{Value, json};

use super::{check_output, print, print_json, read_text};
use crate::args::{PlanAction, PlanArgs, PlanCommand};
use crate::error::CliError;
pub(crate) use calibrate::for_this_machine;
pub(crate) use chosen::{Chosen, UnitPlan};
use units::TraceLine;

/// For a configuration, a cluster, a workload or a calibration.
const MAX_INPUT_BYTES: u64 = 4 << 20;
/// For a trace of lengths, or metrics.
const MAX_TRACE_BYTES: u64 = 1 << 30;

/// The workload assumed by default.
const DEFAULT_WORKLOAD: &str = "requests_per_second = 1\ninput_tokens = 1024\noutput_tokens = 256\n";

pub(crate) fn run(command: &PlanCommand) -> Result<(), CliError> {
    let args = &command.question;
    if let Some(PlanAction::Calibrate(args)) = &command.action {
        return calibrate::run(args);
    }
    match (&args.deployment, &args.model, &args.cluster) {
        (Some(path), ..) => running(args, path),
        (None, Some(model), Some(cluster)) => question(args, model, cluster),
        // Unreachable: clap requires them.
        _ => Err(CliError::input("--model and --cluster are missing")),
    }
}

/// The gain of affinity in a running deployment.
fn running(args: &PlanArgs, path: &Path) -> Result<(), CliError> {
    let judged = affinity::of_deployment(args, path)?;
    match args.json {
        true => print_json("plan", &json!({ "affinity": judged })),
        false => print(&judged.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")),
    }
}

/// Plans for a model on a cluster.
fn question(args: &PlanArgs, model: &Path, cluster: &Path) -> Result<(), CliError> {
    if let Some(html) = &args.html {
        let inputs = [&args.model, &args.cluster, &args.workload, &args.calibration, &args.lengths];
        check_output(html, inputs.into_iter().flatten())?;
    }
    let shape = shape(args, model)?;
    let cluster = parse(cluster, Cluster::from_toml)?;
    let trace = args.lengths.as_deref().map(units::read).transpose()?;
    let workload = workload(args, trace.as_deref())?;
    let calibration = args.calibration.as_deref().map(|named| calibration(named, &shape, &cluster)).transpose()?;
    if let Some(found) = calibration.as_ref().filter(|found| found.gpu != cluster.gpu.name) {
        let (fitted, given) = (&found.gpu, &cluster.gpu.name);
        return Err(CliError::input(format!("the calibration was fitted on {fitted}, and the cluster has {given}")));
    }
    let constants = calibration.as_ref().map_or_else(Constants::uncalibrated, |found| found.constants);
    let accuracy = Accuracy::of(calibration.as_ref());
    let question = Question { shape: &shape, cluster: &cluster, workload: &workload, constants: &constants };
    let mut plan = search(&question).map_err(CliError::input)?;
    if args.worker {
        let runs = |units: u64, layout: &Layout| units == 1 && layout.pipeline == 1;
        plan.ranked.retain(|candidate| runs(candidate.units, &candidate.layout));
        plan.rejected.retain(|rejected| runs(rejected.units, &rejected.layout));
        plan.front.retain(|point| runs(point.units, &point.layout));
    }
    let affinity = affinity::of_plan(args, &question, &plan, &accuracy)?;
    let answer = Answer::new(&question, &plan, accuracy, affinity);
    if let Some(html) = &args.html {
        page::write(html, &shape.architecture, &answer)?;
    }
    let extras = Extras::of(&question, &plan, trace.as_deref())?;
    if args.json {
        let mut document = serde_json::to_value(&answer).map_err(CliError::failed)?;
        document["extras"] = extras.json();
        let domains = extras.domains.as_ref().map(|found| &*found.domains);
        let chosen = plan.ranked.first().map(|best| Chosen::of(&shape, best, &constants, domains));
        let chosen = chosen.transpose()?;
        document["chosen"] = serde_json::to_value(chosen).map_err(CliError::failed)?;
        print_json("plan", &document)?;
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

/// Loads `fitted:ENGINE`, for the cluster's GPU and the model's weights, or a file.
fn calibration(named: &Path, shape: &ModelShape, cluster: &Cluster) -> Result<Calibration, CliError> {
    match named.to_str().and_then(|named| named.strip_prefix("fitted:")) {
        Some(engine) => fitted(engine, &cluster.gpu.name, shape.precision.experts).map_err(CliError::input),
        None => parse(named, Calibration::from_json),
    }
}

/// Parses one of the planner's files; errors name its path.
fn parse<T>(path: &Path, read: impl Fn(&str, &str) -> Result<T, semmoe_planner::PlanError>) -> Result<T, CliError> {
    let text = read_text(path, "file", MAX_INPUT_BYTES)?;
    read(&path.display().to_string(), &text).map_err(CliError::input)
}

fn shape(args: &PlanArgs, model: &Path) -> Result<ModelShape, CliError> {
    let path = if model.is_dir() { model.join("config.json") } else { model.to_owned() };
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

fn workload(args: &PlanArgs, trace: Option<&[TraceLine]>) -> Result<Workload, CliError> {
    let workload = match &args.workload {
        Some(path) => parse(path, Workload::from_toml)?,
        None => Workload::from_toml("the default workload", DEFAULT_WORKLOAD).map_err(CliError::input)?,
    };
    Ok(match trace {
        Some(lines) => units::with_lengths(workload, lines),
        None => workload,
    })
}

/// Whether each rank has complete experts of its own.
fn has_whole_experts(plan: &&Candidate) -> bool {
    plan.layout.expert_tp == 1 && plan.layout.expert_ep > 1
}

/// Additions to the plan: layouts to switch between, and replicas.
struct Extras {
    switching: Option<Result<Switching, NoSwitch>>,
    /// Divisions of a unit into groups, best first.
    groups: Vec<GroupSwitch>,
    replication: Option<Replication>,
    /// Expert domains of the best plan.
    domains: Option<ResidentDomains>,
    /// Units of the trace, if one is given.
    units: Option<UnitMix>,
}

impl Extras {
    fn of(question: &Question<'_>, plan: &Plan, trace: Option<&[TraceLine]>) -> Result<Self, CliError> {
        let Some(best) = plan.ranked.first() else {
            return Ok(Self { switching: None, groups: Vec::new(), replication: None, domains: None, units: None });
        };
        let replication = match plan.ranked.iter().find(has_whole_experts) {
            Some(plan) => replication(question, plan).map_err(CliError::input)?,
            None => None,
        };
        let concurrency = best.at_load.concurrency;
        let arrivals = trace.map(|lines| units::arrivals(lines, question.workload.requests_per_second));
        let switching = switching(question, SwitchUnit::innermost(question.cluster), concurrency);
        let units = match (&switching, &arrivals) {
            (Ok(found), Some(arrivals)) => Some(unit_mix(question, found, arrivals).map_err(CliError::input)?),
            _ => None,
        };
        let groups = group_switches(question, concurrency, arrivals.as_deref()).map_err(CliError::input)?;
        let domains = resident_domains(question, best).map_err(CliError::input)?;
        Ok(Self { switching: Some(switching), groups, replication, domains, units })
    }

    fn json(&self) -> Value {
        let switching = self.switching.as_ref().map(|found| match found {
            Ok(found) => json!(found),
            Err(error) => json!({ "impossible": error.to_string() }),
        });
        json!({
            "switching": switching,
            "groups": self.groups,
            "replication": self.replication,
            "domains": self.domains,
            "units": self.units,
        })
    }

    fn text(&self) -> String {
        let mut text = String::new();
        match &self.switching {
            Some(Ok(found)) => text.push_str(&switching_text(found)),
            Some(Err(error)) => text.push_str(&format!("no switching between TP and EP: {error}\n")),
            None => {}
        }
        if let Some(found) = &self.units {
            text.push_str(&units::text(found));
        }
        if let Some(found) = self.groups.first() {
            text.push_str(&group_text(found));
        }
        let saves = |found: &&Replication| found.resident.seconds < found.resident.ep_seconds * (1.0 - WORTH);
        if let Some(found) = self.replication.as_ref().filter(saves) {
            let (resident, slots) = (&found.resident, found.redundant_slots);
            text.push_str(&format!(
                "replicas: {slots} more slots a layer (domains {:?}, outermost first) would cut a decoding layer's exchange and attention \
                 from {:.0} to {:.0} us\n",
                resident.domains,
                resident.ep_seconds * 1e6,
                resident.seconds * 1e6
            ));
        }
        if let Some(ResidentDomains { domains, step_seconds, expert_bytes }) = &self.domains {
            let [before, after] = step_seconds.map(|seconds| seconds * 1e3);
            text.push_str(&format!(
                "expert domains: with {domains} (semmoe worker --domains) a decoding step would take {after:.2} in place of {before:.2} ms, \
                 and experts {:.1} GB a GPU\n",
                expert_bytes / 1e9
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

/// Describes the best division into groups.
fn group_text(found: &GroupSwitch) -> String {
    let Switching { unit: SwitchUnit { groups, group_gpus }, gpus, room_tokens, .. } = found.switching;
    let below = match found.switching.crossing {
        Crossing::At(sequences) => sequences,
        Crossing::AboveAll => {
            return format!(
                "{groups} groups of {group_gpus} GPUs are faster than EP over {gpus} at every load: run them as units\n"
            );
        }
        Crossing::BelowAll => {
            return format!(
                "EP over {gpus} GPUs is faster than {groups} groups of {group_gpus} at every load: nothing to switch\n"
            );
        }
    };
    let load = match (&found.units, found.at_load) {
        (Some(UnitMix { adaptive, best, .. }), _) => format!(
            "under the trace {:.2} s a request with {} switches, {:.2} s without",
            adaptive.request_seconds, adaptive.switches, best.request_seconds
        ),
        (None, Some(at)) => {
            let limits = if found.within_limits { "" } else { " and miss a limit" };
            format!("at this rate the groups take {:.2} s a request{limits}", at.request_seconds)
        }
        (None, None) => "the groups cannot serve this rate".to_owned(),
    };
    format!(
        "switching {gpus} GPUs between EP and {groups} groups of {group_gpus}, which are faster below {below:.0} requests in flight \
         (worker --switch-groups {groups}; tp_layout = \"tp:{groups}x{group_gpus}\"): a switch takes {:.0} ms ({:.0} ms of it experts); \
         the KV cache has {:.2} million tokens in EP and {:.2} million in groups; {load}\n",
        found.switching.seconds * 1e3,
        found.switching.weight_seconds * 1e3,
        room_tokens.ep / 1e6,
        room_tokens.tp / 1e6,
    )
}
