//! Figure 6d: a layer's collectives by local rate. Rows go to experts drawn at the rate (`--force-local-rate`); with
//! slices of all experts on every rank an all-reduce moves every row whatever its experts are.

use super::{direct, link};
use crate::analysis::Spread;
use crate::configs::Config;
use crate::contest::{Say, Stage, turned};
use crate::counters::ratio;
use crate::error::BenchError;
use crate::measure::{Block, Contestant};
use crate::prepare::Attention;
use crate::report::{head, row, shown};

/// Tokens of a prompt: two steps of a rank.
const TOKENS: usize = 256;

const fn config(name: &'static str, arguments: &'static [&'static str]) -> Config {
    Config { name, solved: false, policy: "round_robin", arguments }
}

/// Local rates, and slices.
const CONFIGS: [Config; 9] = [
    config("0.2", &["--force-local-rate", "0.2"]),
    config("0.3", &["--force-local-rate", "0.3"]),
    config("0.4", &["--force-local-rate", "0.4"]),
    config("0.5", &["--force-local-rate", "0.5"]),
    config("0.6", &["--force-local-rate", "0.6"]),
    config("0.7", &["--force-local-rate", "0.7"]),
    config("0.8", &["--force-local-rate", "0.8"]),
    config("0.9", &["--force-local-rate", "0.9"]),
    config("all-reduce", &["--experts", "tp"]),
];

pub(crate) async fn forced(stage: &Stage<'_>, say: Say<'_>) -> Result<String, BenchError> {
    let traffic = direct(stage, TOKENS)?;
    let mut sides = Vec::new();
    for config in CONFIGS {
        say(&format!("starting: {}", config.name));
        let unit = stage.unit(Attention::Dp, config, None).await?;
        let url = unit.url.clone();
        sides.push(Contestant { config, unit, gateway: None, url });
    }
    let limit = stage.schedule.rates.first().copied();
    let mut blocks: Vec<Vec<Block>> = CONFIGS.map(|_| Vec::new()).into();
    for round in 0..=stage.schedule.rounds {
        stage.network.limit(limit)?;
        for at in turned(sides.len(), round) {
            let block = sides[at].saturate(&traffic).await?;
            say(&format!("round {round}, {}: {:.0} tokens/s", CONFIGS[at].name, block.tokens_per_second));
            // The first round finds caches cold.
            if round > 0 {
                blocks[at].push(block);
            }
        }
    }
    stage.network.limit(None)?;
    for side in sides {
        side.stop().await?;
    }
    Ok(report(stage, &blocks))
}

fn report(stage: &Stage<'_>, blocks: &[Vec<Block>]) -> String {
    let mut text = format!(
        "{} ranks, {} tokens a step and rank, over {}; median (lowest to highest) of {} rounds of {} s at saturation.\n\n",
        stage.workshop.ranks,
        stage.step_tokens,
        link(stage),
        stage.schedule.rounds,
        stage.traffic.seconds
    );
    head(
        &["local rate forced", "counted", "bytes/token", "collectives of a layer, ms", "MoE layer, ms", "tokens/s"],
        &mut text,
    );
    for (config, blocks) in CONFIGS.iter().zip(blocks) {
        let of = |figure: fn(&Block) -> f64, digits| shown(Spread::of(blocks.iter().map(figure)), 1.0, digits);
        let cells = [
            config.name.to_owned(),
            of(|block| block.counters.lar(), 3),
            of(|block| block.counters.all_bytes(), 0),
            of(collectives, 3),
            of(|block| block.counters.moe_time() * 1e3, 3),
            of(|block| block.tokens_per_second, 0),
        ];
        row(&cells, &mut text);
    }
    text
}

/// Milliseconds of a rank in the collectives of a layer, per step.
fn collectives(block: &Block) -> f64 {
    let counters = &block.counters;
    let layers = counters.layers.len() as f64;
    1e3 * ratio(counters.collective_time() * counters.tokens, counters.steps * layers)
}
