//! `GET /admin/routing`: how each model's requests are placed, and the progress of trials.

use schemars::JsonSchema;
use semmoe_routing::{Report, Settings};
use serde::Serialize;

use crate::backends::Model;
use crate::backends::plan::Trial;
use crate::shell::control::Control;

#[derive(Serialize, JsonSchema)]
pub(super) struct Routing {
    models: Vec<ModelRouting>,
    /// Settings as configured; a model's own baseline is listed with the model.
    settings: Settings,
}

#[derive(Serialize, JsonSchema)]
struct ModelRouting {
    model: String,
    policy: &'static str,
    canary: Option<Canary>,
    shadow: Option<Shadow>,
    prefix_table: Option<PrefixTable>,
}

#[derive(Serialize, JsonSchema)]
struct Canary {
    percent: u8,
    baseline: &'static str,
    requests: u64,
    baseline_requests: u64,
}

#[derive(Serialize, JsonSchema)]
struct Shadow {
    /// The policy that places the requests.
    acting: &'static str,
    /// The policy whose choices are only computed.
    watched: &'static str,
    /// Additional fraction of the tokens' activations that would be local; null before the first scored request.
    local_share_gain: Option<f64>,
    report: Report,
}

#[derive(Serialize, JsonSchema)]
struct PrefixTable {
    block_tokens: u32,
    blocks_per_rank: u32,
    /// Memory usage, in bytes, when every rank's table is full.
    memory_bytes: usize,
}

pub(super) fn collect(control: &Control) -> Routing {
    let snapshot = control.backends.snapshot();
    let models = snapshot.models.iter().map(|model| describe(model)).collect();
    Routing { models, settings: snapshot.config.routing.settings.clone() }
}

fn describe(model: &Model) -> ModelRouting {
    let policy = &model.plan.policy;
    let shadow = model.pool.report().zip(policy.watched()).map(|(report, watched)| Shadow {
        acting: policy.acting_name(),
        watched: watched.name(),
        local_share_gain: report.watched.local_share.zip(report.acting.local_share).map(|(would, does)| would - does),
        report,
    });
    let canary = model.plan.trial.as_ref().map(|Trial { canary, baseline, tried, spared }| Canary {
        percent: canary.percent(),
        baseline: baseline.name(),
        requests: tried.get(),
        baseline_requests: spared.get(),
    });
    let prefix_table = model.pool.prefixes().map(|table| PrefixTable {
        block_tokens: table.block_tokens(),
        blocks_per_rank: table.blocks_per_rank(),
        memory_bytes: table.memory_bytes(),
    });
    ModelRouting { model: model.name.clone(), policy: policy.name(), canary, shadow, prefix_table }
}
