//! Figure 4: three systems at every load, and the most that each does within limits on latency.

use std::fmt::Write as _;

use super::{columns, link};
use crate::analysis::Spread;
use crate::contest::{SLO_FACTOR, Say, Stage, turned};
use crate::error::BenchError;
use crate::measure::{Block, Contestant};
use crate::report::{head, row, shown};

/// A block of the open loop.
struct Point {
    side: usize,
    round: usize,
    load: f64,
    block: Block,
}

/// A latency's name and its median in a block.
type Latency = (&'static str, fn(&Block) -> Option<f64>);

const LATENCIES: [Latency; 2] = [
    ("first token", |block| block.ttft_ms.map(|latency| latency.p50)),
    ("end to end", |block| block.e2e_ms.map(|latency| latency.p50)),
];

pub(super) async fn measure(stage: &Stage<'_>, sides: &[Contestant], say: Say<'_>) -> Result<String, BenchError> {
    let traffic = &stage.traffic;
    // The first requests find caches cold.
    for side in sides {
        side.saturate(traffic).await?;
    }
    let kept_up = sides[0].saturate(traffic).await?.requests_per_second;
    let mut points = Vec::new();
    for round in 0..stage.schedule.open_rounds {
        for &load in &stage.schedule.loads {
            for side in turned(sides.len(), round) {
                let block = sides[side].arrive(traffic, load * kept_up, None).await?;
                say(&format!(
                    "round {}, load {load}: {:.0} tokens/s: {}",
                    round + 1,
                    block.tokens_per_second,
                    sides[side].config.name
                ));
                points.push(Point { side, round, load, block });
            }
        }
    }
    let mut text = format!(
        "Loads are shares of the {kept_up:.1} requests/s that {} keeps up with over {}; median (lowest to highest) of {} rounds.\n\n",
        sides[0].config.name,
        link(stage),
        stage.schedule.open_rounds
    );
    by_load(stage, sides, &points, &mut text);
    within(stage, sides, &points, &mut text);
    Ok(text)
}

fn by_load(stage: &Stage<'_>, sides: &[Contestant], points: &[Point], out: &mut String) {
    head(&["load", "", "tokens/s", "first token p50, ms", "p99", "end to end p50, ms", "local"], out);
    for &load in &stage.schedule.loads {
        for (at, side) in sides.iter().enumerate() {
            let of = |figure: &dyn Fn(&Block) -> Option<f64>, digits| {
                let blocks = points.iter().filter(|point| point.side == at && point.load == load);
                shown(Spread::of(blocks.filter_map(|point| figure(&point.block))), 1.0, digits)
            };
            let cells = [
                load.to_string(),
                side.config.name.to_owned(),
                of(&|block| Some(block.tokens_per_second), 0),
                of(&LATENCIES[0].1, 1),
                of(&|block| block.ttft_ms.map(|latency| latency.p99), 1),
                of(&LATENCIES[1].1, 1),
                of(&|block| Some(block.counters.lar()), 3),
            ];
            row(&cells, out);
        }
    }
    out.push('\n');
}

/// The most tokens a second over the loads at which the median latency is within the limit of the round.
fn most(points: &[Point], side: usize, round: usize, latency: Latency) -> Option<f64> {
    let of_round = || points.iter().filter(|point| point.round == round);
    let lightest = of_round().filter(|point| point.side == 0).min_by(|a, b| a.load.total_cmp(&b.load))?;
    let limit = SLO_FACTOR * latency.1(&lightest.block)?;
    let good =
        of_round().filter(|point| point.side == side && latency.1(&point.block).is_some_and(|found| found <= limit));
    good.map(|point| point.block.tokens_per_second).max_by(f64::total_cmp)
}

fn within(stage: &Stage<'_>, sides: &[Contestant], points: &[Point], out: &mut String) {
    let _ = writeln!(
        out,
        "Most tokens/s with a median within {SLO_FACTOR} times the baseline's at the lightest load of the round, and semmoe's over each \
         baseline's, round by round:\n"
    );
    let names = columns(&["limit on"], sides.iter().map(|side| &side.config));
    head(&[&names[..], &["over contiguous", "over MoETuner"]].concat(), out);
    let rounds = 0..stage.schedule.open_rounds;
    for latency in LATENCIES {
        let of = |side| Spread::of(rounds.clone().filter_map(|round| most(points, side, round, latency)));
        let over = |side| {
            let ratio = |round| Some(most(points, 2, round, latency)? / most(points, side, round, latency)?);
            shown(Spread::of(rounds.clone().filter_map(ratio)), 1.0, 2)
        };
        let throughput = (0..sides.len()).map(|side| shown(of(side), 1.0, 0));
        let cells: Vec<String> =
            [latency.0.to_owned()].into_iter().chain(throughput).chain([over(0), over(1)]).collect();
        row(&cells, out);
    }
}
