//! `--affinity`: the gain from co-locating tokens with their experts, in the best plan or in a running deployment.

use std::path::Path;

use semmoe_engines::metrics::Sample;
use semmoe_planner::affinity::{Remote, StepProfile, gain};
use semmoe_planner::calibration::Accuracy;
use semmoe_planner::deployment::{Deployment, UnitCounts};
use semmoe_planner::report::Judged;
use semmoe_planner::search::{Plan, Question};
use semmoe_planner::step::{Target, decoding, prompts};
use serde_json::Value;

use super::{MAX_INPUT_BYTES, MAX_TRACE_BYTES, has_whole_experts};
use crate::args::PlanArgs;
use crate::commands::read_text;
use crate::error::CliError;

/// The rates given by `--affinity`: with affinity, and with random routing if known.
#[derive(Clone, Copy, Debug, Default)]
struct Promised {
    local_rate: f64,
    local_random: Option<f64>,
    /// Number of remote ranks that a token is sent to.
    remote_ranks: Option<f64>,
    remote_random: Option<f64>,
}

/// The current rates, if known.
#[derive(Clone, Copy, Debug)]
struct Now {
    local_rate: Option<f64>,
    remote_ranks: Option<f64>,
}

/// Returns the gains in decode and prefill for the best plan with unsliced experts.
pub(super) fn of_plan(
    args: &PlanArgs,
    question: &Question<'_>,
    plan: &Plan,
    accuracy: &Accuracy,
) -> Result<Vec<Judged>, CliError> {
    let Some(named) = &args.affinity else { return Ok(Vec::new()) };
    let Some(best) = plan.ranked.iter().find(has_whole_experts).or(plan.ranked.first()) else { return Ok(Vec::new()) };
    let promised = promised(named)?;
    let chance = 1.0 / best.layout.expert_ep.max(2) as f64;
    let now = Now { local_rate: args.lar_before, remote_ranks: None };
    let remote = remote(args, &promised, now, chance)?;
    let Question { shape, cluster, constants, .. } = *question;
    let target = Target { shape, cluster, layout: best.layout, constants };
    let load = question.workload.load(best.at_load.concurrency);
    let groups = best.layout.attention_dp as f64;
    let works =
        [("decoding", decoding(best.at_load.concurrency.max(groups), &load)), ("prefill", prompts(groups, &load))];
    let judged = works.into_iter().map(|(step, work)| {
        let profile = StepProfile::predicted(&target, &work, args.overlap);
        let layout = format!("{} x {}", best.units, best.layout.name());
        let gain = gain(&profile, &remote, accuracy.factor()).map_err(CliError::input)?;
        Ok(Judged { step: step.to_owned(), layout, gain })
    });
    judged.collect()
}

/// Returns the gain in each step of a running deployment.
pub(super) fn of_deployment(args: &PlanArgs, path: &Path) -> Result<Vec<Judged>, CliError> {
    let named = args.affinity.as_deref().unwrap_or_default();
    let (deployment, promised) = (deployment(path)?, promised(named)?);
    let now = Now { local_rate: args.lar_before.or(deployment.local_rate), remote_ranks: deployment.remote_ranks };
    let rows = now.remote_ranks.is_some() && promised.remote_ranks.is_some();
    if !rows && now.local_rate.is_none() && promised.local_random.is_none() {
        let missing = "neither this file nor --lar-before states the current local rate to compare --affinity with";
        return Err(CliError::input(format!("{}: {missing}", path.display())));
    }
    let remote = remote(args, &promised, now, 0.0)?;
    let judged = deployment.steps.into_iter().map(|step| {
        let profile = StepProfile { overlap: step.profile.overlap || args.overlap, ..step.profile };
        let gain = gain(&profile, &remote, 1.0).map_err(CliError::input)?;
        Ok(Judged { step: step.name, layout: deployment.name.clone(), gain })
    });
    judged.collect()
}

/// Compares remote ranks per token if known before and after, otherwise local rates; `chance` is the local rate of
/// random routing, for use if no other rate is known.
fn remote(args: &PlanArgs, promised: &Promised, now: Now, chance: f64) -> Result<Remote, CliError> {
    let known = now.remote_ranks.or(promised.remote_random.filter(|_| now.local_rate.is_none()));
    if let Some((before, after)) = known.zip(promised.remote_ranks) {
        // The error in remote ranks is proportional to the error in the rate.
        let error = args.lar_error * after / (1.0 - promised.local_rate).max(args.lar_error);
        return Ok(Remote { before, after, error });
    }
    let before = now.local_rate.or(promised.local_random).unwrap_or(chance);
    Remote::of_rates(before, promised.local_rate, args.lar_error).map_err(CliError::input)
}

fn deployment(path: &Path) -> Result<Deployment, CliError> {
    if path.extension().is_some_and(|extension| extension == "toml") {
        return super::parse(path, Deployment::from_toml);
    }
    let text = read_text(path, "metrics", MAX_INPUT_BYTES)?;
    let (mut counts, mut ranks) = (UnitCounts::default(), 0);
    for sample in text.lines().filter_map(Sample::parse) {
        match (sample.name, sample.label("where"), sample.label("kind")) {
            ("semmoe_steps_total", ..) => {
                counts.steps += sample.value;
                ranks += 1;
            }
            ("semmoe_step_seconds_total", ..) => counts.step_seconds += sample.value,
            ("semmoe_collective_seconds_total", _, Some("dispatch" | "combine")) => {
                counts.exchange_seconds += sample.value;
            }
            ("semmoe_activations_total", Some("local"), _) => counts.local += sample.value,
            ("semmoe_activations_total", ..) => counts.remote += sample.value,
            _ => {}
        }
    }
    if ranks == 0 {
        let expected = "a deployment description ending in .toml, or the /metrics of semmoe's worker";
        return Err(CliError::input(format!("{} has no semmoe_steps_total, expected {expected}", path.display())));
    }
    let of = |error| CliError::input(format!("{}: {error}", path.display()));
    Deployment::of_counts(format!("{ranks} running ranks"), &counts).map_err(of)
}

/// The gateway metric that counts activations in sampled requests.
const SAMPLED: &str = "semmoe_sampled_activations_total";

/// Parses `--affinity`: a rate, the output of `semmoe evaluate --json`, or a gateway's metrics.
fn promised(named: &str) -> Result<Promised, CliError> {
    if let Ok(local_rate) = named.parse() {
        return Ok(Promised { local_rate, ..Promised::default() });
    }
    let text = read_text(Path::new(named), "local activation rate", MAX_TRACE_BYTES)?;
    if let Ok(evaluation) = serde_json::from_str::<Value>(&text) {
        // With attention dp the policy decides where requests go.
        let policy = &evaluation["policies"]["affinity"];
        let local_rate = policy["request_lar"].as_f64().or(evaluation["lar"].as_f64());
        let local_rate =
            local_rate.ok_or_else(|| CliError::input(format!("{named}: `lar` is missing, expected a number")))?;
        let rank = "remote_ranks_per_token";
        return Ok(Promised {
            local_rate,
            local_random: evaluation["lar_random"].as_f64(),
            remote_ranks: policy[rank].as_f64().or(evaluation[rank].as_f64()),
            remote_random: evaluation["remote_ranks_blocks"].as_f64(),
        });
    }
    let samples = text.lines().filter_map(Sample::parse).filter(|sample| sample.name == SAMPLED);
    let (mut local, mut all) = (0.0, 0.0);
    for sample in samples.filter(|sample| sample.value.is_finite()) {
        all += sample.value;
        local += if sample.label("place") == Some("local") { sample.value } else { 0.0 };
    }
    if all <= 0.0 {
        let expected = format!("the output of `semmoe evaluate --json`, or metrics with {SAMPLED}");
        return Err(CliError::input(format!("{named} has no local activation rate, expected {expected}")));
    }
    Ok(Promised { local_rate: local / all, ..Promised::default() })
}
