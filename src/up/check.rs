//! `up --check`: serves the same held-out prompts twice. With attention dp: contiguous placement with round robin, then
//! solved tables with affinity. With attention tp: contiguous placement with rows in order, then solved tables with
//! shuffled rows. If there are slots for replicas, a third run uses tables with replicas.

use std::path::Path;
use std::time::Duration;

use semmoe_engines::http::{BaseUrl, HttpClient};
use semmoe_solver::{EvalInput, EvalOptions, evaluate};
use semmoe_tables::{Attention, Phase, ProfileBuilder, Tables, Trace};

use super::assets::Assets;
use super::cache::Cache;
use super::drive::{Job, Sending, drive, read_jobs};
use super::front::Front;
use super::report::{CheckReport, Measured, Predicted, Traffic, WithReplicas};
use super::scrape::{Samples, UnitCounters, page};
use super::setup::{Recording, recorded};
use super::unit::UnitLayout;
use crate::error::CliError;

/// Tokens to generate per prompt: a short decode phase, as in real traffic.
const MAX_TOKENS: u32 = 16;
/// Requests in flight per rank.
const CONCURRENCY_PER_RANK: u16 = 4;
/// Name of the policy under test.
const AFFINITY: &str = "affinity";
/// Title of the configuration with replicas.
const REPLICAS: &str = "tables with replicas";

/// Measures the configurations and predicts those with tables.
pub(crate) async fn check(assets: &Assets, cache: &Cache, layout: UnitLayout) -> Result<CheckReport, CliError> {
    let model = assets.model_name()?;
    let jobs = read_jobs(&assets.heldout_prompts, &model, MAX_TOKENS)?;
    let titles = match layout.attention.attention {
        Attention::Dp => ["contiguous, round robin", "tables, affinity"],
        Attention::Tp => ["contiguous, plain", "tables, shuffled"],
    };
    let heldout = heldout(assets, cache, layout).await?;
    let baseline = measure(assets, layout, None, &jobs, titles[0]).await?;
    let of_tables = async |redundant, title| {
        let tables = cache.tables(redundant);
        let measured = measure(assets, layout, Some(&tables), &jobs, title).await?;
        let predicted = predict(&heldout, &tables, layout, &measured)?;
        Ok::<_, CliError>((measured, predicted))
    };
    let (affinity, predicted) = of_tables(0, titles[1]).await?;
    let replicas = match layout.redundant {
        0 => None,
        redundant => {
            let (measured, predicted) = of_tables(redundant, REPLICAS).await?;
            Some(WithReplicas { redundant, measured, predicted })
        }
    };
    Ok(CheckReport { titles, baseline, affinity, predicted_lar: predicted.lar, predicted, replicas })
}

/// Records the routing of the held-out prompts, which neither profile nor solver has seen, directly from a unit.
async fn heldout(assets: &Assets, cache: &Cache, layout: UnitLayout) -> Result<Trace, CliError> {
    let work = Recording {
        prompts: &assets.heldout_prompts,
        out: cache.heldout_trace(),
        max_tokens: MAX_TOKENS,
        title: "recording held-out routing",
    };
    recorded(assets, cache, layout, work).await
}

/// Predicts the results by running `evaluate` on the held-out routing. This models neither the gateway nor its live
/// loads. With attention tp it uses the measured mean tokens per step, because small steps are harder to split evenly.
fn predict(heldout: &Trace, tables: &Path, layout: UnitLayout, measured: &Measured) -> Result<Predicted, CliError> {
    let tables = Tables::open(tables).map_err(CliError::input)?;
    let judged = |input, options| evaluate(&tables, input, &options).map_err(CliError::failed);
    if layout.attention.attention == Attention::Tp {
        let step_tokens = measured.whole.tokens_per_step.round().max(1.0) as usize;
        let options = EvalOptions { step_tokens: Some(step_tokens), ..EvalOptions::default() };
        let evaluation = judged(EvalInput::Trace(heldout), options)?;
        let expert_load_max_over_mean = evaluation.expert_load_imbalance;
        return Ok(Predicted { lar: evaluation.lar, token_lar: evaluation.lar, expert_load_max_over_mean });
    }
    let options = EvalOptions {
        concurrency: usize::from(layout.ranks * CONCURRENCY_PER_RANK),
        policies: vec![AFFINITY.to_owned()],
        ..EvalOptions::default()
    };
    let evaluation = judged(EvalInput::Trace(heldout), options)?;
    let affinity = evaluation.policies.as_ref().and_then(|policies| policies.get(AFFINITY));
    let affinity = affinity.ok_or_else(|| CliError::failed("the evaluation has no result for the affinity policy"))?;
    let mut counts = ProfileBuilder::new(heldout.model().clone(), heldout.provenance().clone(), Phase::All)
        .map_err(CliError::failed)?;
    counts.add_trace(heldout).map_err(CliError::failed)?;
    let counts = counts.finish().map_err(CliError::failed)?;
    let tokens = judged(EvalInput::Profile(&counts), EvalOptions::default())?;
    Ok(Predicted {
        lar: affinity.request_lar,
        token_lar: tokens.lar,
        expert_load_max_over_mean: evaluation.expert_load_imbalance,
    })
}

/// Measures one configuration, with and without streaming.
async fn measure(
    assets: &Assets,
    layout: UnitLayout,
    tables: Option<&Path>,
    jobs: &[Job],
    title: &'static str,
) -> Result<Measured, CliError> {
    let concurrency = usize::from(layout.ranks * CONCURRENCY_PER_RANK);
    let of = async |stream| traffic(assets, layout, tables, jobs, Sending { concurrency, stream, title }).await;
    Ok(Measured { requests: jobs.len(), streamed: of(true).await?, whole: of(false).await? })
}

/// Measures one kind of traffic with newly started ranks and a new gateway.
async fn traffic(
    assets: &Assets,
    layout: UnitLayout,
    tables: Option<&Path>,
    jobs: &[Job],
    sending: Sending,
) -> Result<Traffic, CliError> {
    let (mut unit, gateway) = super::start(assets, layout, tables, Front::default()).await?;
    let client = HttpClient::default();
    let engine: BaseUrl = unit.url.parse().map_err(CliError::failed)?;
    let url: BaseUrl = format!("http://{}", gateway.data_addr()).parse().map_err(CliError::failed)?;
    let before = page(&client, &engine).await?;
    let mut samples = Samples::default();
    let took = tokio::select! {
        took = drive(&client, &url, jobs, sending) => took?,
        death = unit.died() => return Err(super::unit::failure(death)),
        failed = samples.go_on(&client, &engine) => return Err(failed),
    };
    let counters = UnitCounters::between(before, page(&client, &engine).await?)?;
    gateway.shutdown(Duration::from_secs(1)).await;
    unit.stop().await;
    Ok(Traffic::of(&counters, &samples, took))
}
