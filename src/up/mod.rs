//! `semmoe up`: the full pipeline on one machine, from prompts to a served model.

mod assets;
mod cache;
mod check;
mod drive;
mod front;
mod report;
mod scrape;
mod setup;
mod unit;

use std::path::Path;
use std::time::Duration;

use semmoe_engines::http::HttpClient;
use semmoe_gateway::Running;
use semmoe_tables::Attention;
use semmoe_worker::{RankDeath, Ranks};

use crate::args::{PlanSource, UpArgs};
use crate::commands::plan::{self, Chosen, UnitPlan};
use crate::commands::{announce, print, print_json};
use crate::error::CliError;
use crate::progress::say;
use crate::signals::{Stops, block_on};
use assets::Assets;
use cache::Cache;
pub(crate) use cache::default_folder;
use front::{Front, check_ports, start_gateway};
use scrape::{UnitCounters, page};
use unit::{UnitLayout, UnitSpec};

/// Grace period for requests in flight after a stop request.
const GRACE: Duration = Duration::from_secs(5);
/// How long the gateway keeps responding after a rank dies, so that clients see the cause rather than a refused
/// connection.
const AFTER_DEATH: Duration = Duration::from_secs(5);

/// JSON messages of an example request, similar to the bundled model's training data.
const EXAMPLE: &str = r#"[{"role": "system", "content": "You are a voice assistant that takes orders for a coffee business."},
     {"role": "user", "content": "I would like to order a cappuccino."}]"#;

pub(crate) fn run(args: &UpArgs) -> Result<(), CliError> {
    let assets = Assets::find(args.model.clone())?;
    let data = args.data.clone().unwrap_or_else(default_folder);
    let planned = args.plan.as_ref().map(|source| planned(source, &assets, &data)).transpose()?;
    let layout = UnitLayout::of(args, planned)?;
    setup::check_slots(&assets, layout, args.check)?;
    if !args.check {
        check_ports(args.port)?;
    }
    let cache = Cache::open(&data, &assets, layout.ranks, layout.attention.attention)?;
    block_on(async {
        let mut stops = Stops::listen();
        if layout.takes_tables() {
            // The check also measures tables without replicas, for comparison.
            let plain = UnitLayout { redundant: 0, ..layout };
            for layout in [plain, layout].iter().skip(usize::from(!args.check || layout.redundant == 0)) {
                stops.until_stopped(setup::prepare(&assets, &cache, *layout)).await?;
            }
        }
        if args.check {
            let report = stops.until_stopped(check::check(&assets, &cache, layout)).await?;
            return if args.json { print_json("up", &report) } else { print(&report.to_string()) };
        }
        serve(args, &assets, &cache, layout, stops).await
    })
}

/// Returns the unit that a plan chose.
fn planned(source: &PlanSource, assets: &Assets, data: &Path) -> Result<UnitPlan, CliError> {
    let path = match source {
        PlanSource::Auto => {
            let folder = data.join(format!("{}-calibration", assets.model_name()?));
            return plan::for_this_machine(&assets.model, &folder);
        }
        PlanSource::File(path) => path,
    };
    let chosen = Chosen::read(path, &assets.model)?;
    match chosen.units {
        1 => chosen.unit(),
        units => {
            let path = path.display();
            Err(CliError::input(format!("the plan {path} has {units} units side by side, but `up` starts only one")))
        }
    }
}

async fn serve(
    args: &UpArgs,
    assets: &Assets,
    cache: &Cache,
    layout: UnitLayout,
    mut stops: Stops,
) -> Result<(), CliError> {
    let tables = layout.takes_tables().then(|| cache.tables(layout.redundant));
    let front = Front { port: args.port, samples: true };
    let (mut unit, gateway) = stops.until_stopped(start(assets, layout, tables.as_deref(), front)).await?;
    announce(&welcome(&gateway, assets, cache)?);
    tokio::select! {
        _ = stops.next() => {
            say(&format!("stopping; {}", totals(&unit.url).await));
            gateway.shutdown(GRACE).await;
            unit.stop().await;
            Ok(())
        }
        death = unit.died() => after_death(death, unit, gateway, stops).await,
    }
}

/// Formats the ranks' totals since they started.
async fn totals(engine: &str) -> String {
    let counted = async {
        let engine = engine.parse().map_err(CliError::failed)?;
        UnitCounters::between(String::new(), page(&HttpClient::default(), &engine).await?)
    };
    match counted.await {
        Ok(counted) => format!(
            "since the start: {} tokens, local activation rate {:.4}, {:.0} bytes between ranks per token",
            counted.tokens(),
            counted.lar(),
            counted.remote_bytes_per_token()
        ),
        Err(error) => error.to_string(),
    }
}

/// Starts a unit with these tables and a gateway in front of it.
async fn start(
    assets: &Assets,
    layout: UnitLayout,
    tables: Option<&Path>,
    front: Front,
) -> Result<(Ranks, Running), CliError> {
    let spec = UnitSpec { model: assets.model.clone(), tables: tables.map(Path::to_owned), layout };
    let unit = spec.start().await?;
    // With attention tp, the gateway sees the unit as a single rank and has nothing to choose between.
    let tables = tables.filter(|_| layout.attention.attention == Attention::Dp);
    let gateway = start_gateway(assets, &unit.url, layout.replicas(), tables, front).await?;
    Ok((unit, gateway))
}

/// Shuts down after a rank dies, as a unit cannot continue without it. The gateway first keeps reporting the cause to
/// clients for a while.
async fn after_death(death: RankDeath, unit: Ranks, gateway: Running, mut stops: Stops) -> Result<(), CliError> {
    say(&format!("{death}; requests are rejected with this cause for {AFTER_DEATH:?}, then everything stops"));
    tokio::select! {
        () = tokio::time::sleep(AFTER_DEATH) => {}
        _ = stops.next() => {}
    }
    gateway.shutdown(Duration::ZERO).await;
    unit.stop().await;
    Err(CliError::failed(death))
}

/// The startup message: the address first, for scripts; then the model, an example request, and further commands.
fn welcome(gateway: &Running, assets: &Assets, cache: &Cache) -> Result<String, CliError> {
    let (data, admin, model) = (gateway.data_addr(), gateway.admin_addr(), assets.model_name()?);
    let toy = match assets.bundled {
        true => format!(
            "{model}, a toy model with 15 million parameters: it takes orders in a coffee shop, more or less, and knows nothing else.\n       \
             Only its routing is real"
        ),
        false => model.clone(),
    };
    let prompts = assets.heldout_prompts.display();
    Ok(format!(
        "ready: http://{data}\n\
         admin: http://{admin}\n\
         model: {toy}\n\
         data:  {}\n\n\
         Send it a request (-N: print words as they arrive; x-semmoe-rank: the chosen rank):\n  \
         curl -isN http://{data}/v1/chat/completions -H 'content-type: application/json' \\\n    \
         -d '{{\"model\": \"{model}\", \"max_tokens\": 32, \"temperature\": 0, \"stream\": true, \"messages\":\n     {EXAMPLE}}}'\n\n\
         Then inspect the ranks, and put them under load:\n  \
         http://{admin}/ui in a browser\n  \
         curl -s http://{admin}/admin/backends\n  \
         semmoe load --url http://{data} --prompts {prompts} --max-tokens 16 --concurrency 8 --requests 200\n\n\
         Ctrl-C stops everything; `semmoe up --check` then shows the gain from the tables",
        cache.folder.display()
    ))
}
