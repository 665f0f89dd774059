//! The paper's figures drawn from the measurements.

use semmoe_bench_papers::chart::{Axis, Panel, Series, draw};

use crate::analysis::{Line, Spread};
use crate::results::{Outcome, Placed};

/// File names and contents.
pub(crate) fn pictures(outcomes: &[Outcome]) -> Vec<(&'static str, String)> {
    let each = |panel: fn(&Outcome) -> Panel| draw(&outcomes.iter().map(panel).collect::<Vec<_>>());
    let latencies: Vec<Panel> = outcomes.iter().flat_map(latency_panels).collect();
    vec![
        ("figure4-latency-throughput.svg", draw(&latencies)),
        ("figure5a-moe-latency-lar.svg", each(moe_panel)),
        ("figure6d-all-to-all-local-share.svg", each(all_to_all_panel)),
    ]
}

fn axis(label: &str, log: bool) -> Axis {
    Axis { label: label.to_owned(), log }
}

/// Figure 4: one panel for each link.
fn latency_panels(outcome: &Outcome) -> Vec<Panel> {
    let median = |blocks: Vec<&Placed>, of: fn(&Placed) -> Option<f64>| {
        Spread::of(blocks.into_iter().filter_map(of)).map(|spread| spread.median)
    };
    let series = |link: usize| {
        let configs = outcome.contest.configs().into_iter().enumerate();
        let of_side = move |(side, config): (usize, crate::configs::Config)| {
            let point = |load: f64| {
                let blocks = || outcome.arrived(side, link, load).collect::<Vec<_>>();
                let throughput = median(blocks(), |at| Some(at.block.requests_per_second))?;
                Some((throughput, median(blocks(), |at| at.block.e2e_ms.map(|latency| latency.mean))?))
            };
            let points = outcome.loads().into_iter().filter_map(point).collect();
            Series { name: config.name.to_owned(), points, line: true, marks: true, ..Series::default() }
        };
        configs.map(of_side).collect()
    };
    let panel = |(link, at): (usize, &crate::results::Link)| Panel {
        title: format!("attention {}, {}", outcome.contest.attention, at.name),
        x: axis("requests/s", false),
        y: axis("mean latency, ms", true),
        series: series(link),
    };
    let links = outcome.links.iter().enumerate().filter(|(link, _)| outcome.levels.contains_key(link));
    links.map(panel).collect()
}

/// Figure 5a: every layer of every block at saturation.
fn moe_panel(outcome: &Outcome) -> Panel {
    let points = |link: usize| {
        let of_block = |at: &Placed| {
            let steps = at.block.counters.steps;
            let layers = at.block.counters.layers.values();
            layers.map(|layer| (layer.lar(), layer.moe_seconds / steps * 1e3)).collect::<Vec<_>>()
        };
        [0, 1].into_iter().flat_map(|side| outcome.saturated(side, link)).flat_map(of_block).collect::<Vec<_>>()
    };
    Panel {
        title: format!("attention {}", outcome.contest.attention),
        x: axis("local activation rate of the layer", false),
        y: axis("MoE layer, ms of a step", false),
        series: with_lines(outcome, points),
    }
}

/// Figure 6d, with the lines that gamma comes from.
fn all_to_all_panel(outcome: &Outcome) -> Panel {
    let gammas: Vec<Option<f64>> = outcome.summary().links.iter().map(|link| link.gamma).collect();
    let points = |link: usize| outcome.layer_points(link).into_iter().map(|(lar, time)| (lar, time * 1e6)).collect();
    Panel {
        title: format!("attention {}", outcome.contest.attention),
        x: axis("local share of the layer", false),
        y: axis("dispatch and combine, us per token", false),
        series: named(with_lines(outcome, points), gammas),
    }
}

/// Appends to each series' name the gamma that its line gives.
fn named(mut all: Vec<Series>, gammas: Vec<Option<f64>>) -> Vec<Series> {
    for (series, gamma) in all.iter_mut().zip(gammas) {
        if let Some(gamma) = gamma {
            series.name.push_str(&format!(", gamma {gamma:.2}"));
        }
    }
    all
}

/// The points of each link, and a line through them.
fn with_lines(outcome: &Outcome, points: impl Fn(usize) -> Vec<(f64, f64)>) -> Vec<Series> {
    let mut all = Vec::new();
    for (link, at) in outcome.links.iter().enumerate() {
        let points = points(link);
        let fitted = Line::fit(&points).map(|line| {
            let ends = Spread::of(points.iter().map(|point| point.0));
            ends.map_or_else(Vec::new, |ends| [ends.least, ends.greatest].map(|x| (x, line.at(x))).to_vec())
        });
        all.push(Series {
            name: at.name.clone(),
            points,
            fitted: fitted.unwrap_or_default(),
            line: false,
            marks: true,
        });
    }
    all
}
