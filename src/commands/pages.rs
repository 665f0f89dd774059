//! HTML pages about tables and their evaluation, in the profiler's page layout.

use semmoe_profiler::Verdict;
use semmoe_profiler::html::{Axes, Bar, Cells, GroupLoads, KINDS, Mark, Scale, Sheet, Svg, bars, group_loads};
use semmoe_solver::{Evaluation, Reliability};
use semmoe_tables::{Attention, LayerIdx, Tables, TokenId};

use super::outcome::Outcome;

/// Number of histogram bars.
const BINS: usize = 20;

/// Contents of an evaluation page.
pub(crate) struct Judged<'a> {
    pub(crate) evaluation: &'a Evaluation,
    pub(crate) outcome: &'a Outcome,
    pub(crate) groups: &'a GroupLoads,
    pub(crate) verdict: &'a Verdict,
}

/// Builds a page about tables without an evaluation; `facts` come first.
pub(crate) fn tables(tables: &Tables, facts: Vec<(&'static str, String)>) -> Sheet {
    let mut sections = vec![("Experts by group", experts(tables))];
    if tables.attention() == Attention::Dp {
        sections.push(("Confidence of T", confidence(tables)));
    }
    sections.push(("Prices", prices(tables)));
    Sheet { title: format!("Tables of {}", tables.model().model), facts, sections, ..Sheet::default() }
}

/// Builds a page about tables evaluated on traffic.
pub(crate) fn evaluation(tables: &Tables, judged: &Judged<'_>) -> Sheet {
    let Judged { evaluation, outcome, groups, verdict } = *judged;
    let mut sections = vec![
        ("Outcome", outcome.html()),
        ("Local activation rate by layer", layers(tables, evaluation)),
        ("Group load, before and after", group_loads(groups)),
    ];
    if let Some(policies) = policies(evaluation) {
        sections.push(("Routing policies, simulated", policies));
    }
    let curves = [("tokens", &evaluation.calibration.tokens), ("requests", &evaluation.calibration.requests)];
    let curves: String =
        curves.iter().filter_map(|(of, curve)| curve.as_ref().map(|curve| calibration(of, curve))).collect();
    if !curves.is_empty() {
        sections.push(("Calibration of T's shares", curves));
    }
    let facts = vec![
        ("tables", format!("{}, {} groups, digest {}", tables.attention(), tables.groups(), tables.digest())),
        ("tokens judged", evaluation.tokens.to_string()),
    ];
    let title = format!("Tables of {}, evaluated", tables.model().model);
    Sheet { title, facts, verdict: Some(verdict.clone()), sections, ..Sheet::default() }
}

/// Draws one row per layer and one cell per expert in id order, coloured by group.
fn experts(tables: &Tables) -> String {
    const LEFT: f64 = 56.0;
    const TOP: f64 = 44.0;
    let (model, placement, groups) = (tables.model(), tables.placement(), tables.groups());
    let rows: Vec<Vec<f64>> = (0..model.layers())
        .map(|layer| placement.layer(LayerIdx::new(layer as u16)).iter().map(|group| f64::from(*group + 1)).collect())
        .collect();
    let wide = (760.0 / f64::from(model.num_experts)).clamp(3.0, 24.0);
    let high = (420.0 / rows.len().max(1) as f64).clamp(9.0, 20.0);
    let scale = Scale::Up(f64::from(groups));
    let cells = Cells { x: LEFT, y: TOP, wide, high, rows: &rows, scale };
    let bottom = TOP + high * rows.len() as f64;
    let mut svg = Svg::new((LEFT + wide * f64::from(model.num_experts) + 20.0).max(420.0), bottom + 60.0);
    svg.cells(&cells);
    svg.tips(&cells, |row, column| {
        let id = model.layer_ids[row];
        match column {
            Some(expert) => format!("layer {id}, expert {expert}: group {}", rows[row][expert] - 1.0),
            None => {
                let of = |group: u16| {
                    let experts = placement.experts_of(LayerIdx::new(row as u16), semmoe_tables::GroupId::new(group));
                    let ids: Vec<String> = experts.map(|expert| expert.get().to_string()).collect();
                    format!("group {group}: {}", ids.join(" "))
                };
                format!("layer {id}; {}", (0..groups).map(of).collect::<Vec<_>>().join("; "))
            }
        }
    });
    svg.numbers(LEFT, TOP, wide, model.num_experts.into(), "experts");
    for (row, id) in model.layer_ids.iter().enumerate() {
        svg.text(LEFT - 6.0, TOP + (row as f64 + 0.5) * high + 4.0, "end", "", &id.to_string());
    }
    svg.layers(LEFT, TOP, bottom, scale, "group", ["", "", &(groups - 1).to_string()]);
    let replicas = if tables.physical_to_logical().is_some() { " Replicas are not drawn." } else { "" };
    format!(
        "<p>The group (rank) that hosts each expert.{replicas}</p>\n{}",
        svg.finish(&format!("Map of {} experts in {} layers by group", model.num_experts, rows.len()))
    )
}

/// Draws a histogram of tokens by T's expected share on their most likely rank.
fn confidence(tables: &Tables) -> String {
    let mut counts = [0u64; BINS];
    let mut unknown = 0u64;
    for token in (0..tables.model().vocab_size).map(TokenId::new) {
        let best =
            tables.token_row(token).into_iter().flatten().map(|share| f64::from(share.to_f32())).fold(0.0, f64::max);
        // A row of zeros means that T knows nothing about the token.
        match best > 0.0 {
            true => counts[((best * BINS as f64) as usize).min(BINS - 1)] += 1,
            false => unknown += 1,
        }
    }
    let bar = |(at, count): (usize, &u64)| Bar {
        label: format!("{:.2} to {:.2}", at as f64 / BINS as f64, (at + 1) as f64 / BINS as f64),
        value: *count as f64,
        shown: format!("{count} tokens"),
        kind: 0,
    };
    let all: Vec<Bar> = counts.iter().enumerate().map(bar).collect();
    let most = counts.iter().copied().max().unwrap_or(0) as f64;
    format!(
        "<p>The share of each vocabulary token's activations that T expects on the token's most likely rank; 1/{} \
         means no preference. Nothing is known about {unknown} tokens.</p>\n{}",
        tables.dp_ranks(),
        bars("Histogram of each token's largest share", &all, most, None)
    )
}

fn prices(tables: &Tables) -> String {
    let bar = |(rank, price): (usize, &f32)| Bar {
        label: format!("{} {rank}", if tables.attention() == Attention::Dp { "rank" } else { "group" }),
        value: f64::from(*price),
        shown: format!("{price:.4}"),
        kind: 1,
    };
    let all: Vec<Bar> = tables.price().iter().enumerate().map(bar).collect();
    let most = tables.price().iter().copied().fold(0.0, f32::max);
    format!(
        "<p>Subtracted from a request's share before ranks are compared: ranks in high demand cost more, which keeps loads \
         balanced.</p>\n{}",
        bars("Price of each rank", &all, f64::from(most), None)
    )
}

fn layers(tables: &Tables, evaluation: &Evaluation) -> String {
    let rates = tables.model().layer_ids.iter().zip(&evaluation.lar_per_layer);
    let bar = |(id, rate): (&u16, &Option<f64>)| Bar {
        label: format!("layer {id}"),
        value: rate.unwrap_or(0.0),
        shown: rate.map_or_else(|| "no known route".to_owned(), |rate| format!("{rate:.4}")),
        kind: 0,
    };
    let all: Vec<Bar> = rates.map(bar).collect();
    format!(
        "<p>Share of each layer's activations on the token's own rank; the dashed line marks random routing.</p>\n{}",
        rates_beside_random("Local activation rate by layer", &all, evaluation)
    )
}

/// Draws bars of local activation rates, with a mark at the rate of random ranks.
fn rates_beside_random(title: &str, all: &[Bar], evaluation: &Evaluation) -> String {
    let random = Mark { value: evaluation.lar_random, label: &format!("random {:.3}", evaluation.lar_random) };
    bars(title, all, 1.0, Some(&random))
}

/// Draws the rates of online policies, and of references with information that no online policy has.
fn policies(evaluation: &Evaluation) -> Option<String> {
    let simulated = evaluation.policies.as_ref()?;
    let references = [
        ("argmax, ignoring load", evaluation.argmax),
        ("windows, exact", evaluation.windowed),
        ("all requests at once, by T", evaluation.batch_predicted),
        ("all requests at once, by true routing", evaluation.batch_optimum),
    ];
    let references = references.into_iter().filter_map(|(name, figures)| Some((name, figures?, 4)));
    let all = simulated.iter().map(|(name, figures)| (name.as_str(), *figures, 0)).chain(references);
    let bar = |(name, figures, kind): (&str, semmoe_solver::RequestFigures, usize)| Bar {
        label: name.to_owned(),
        value: figures.request_lar,
        shown: format!(
            "{:.4}, load {:.3}, worst burst {:.3}",
            figures.request_lar, figures.request_imbalance, figures.burst_imbalance
        ),
        kind,
    };
    let all: Vec<Bar> = all.map(bar).collect();
    Some(format!(
        "<p>Local activation rate by requests; load is the busiest rank's tokens over the mean, overall and in the worst 64 consecutive \
         requests. Lighter bars know future requests or ignore load.</p>\n{}",
        rates_beside_random("Local activation rate of each routing policy", &all, evaluation)
    ))
}

/// Draws the calibration curve: observed against predicted shares.
fn calibration(of: &str, curve: &Reliability) -> String {
    const SIDE: f64 = 300.0;
    const LEFT: f64 = 60.0;
    const TOP: f64 = 16.0;
    let mut svg = Svg::new(LEFT + SIDE + 40.0, TOP + SIDE + 50.0);
    let axes = Axes { left: LEFT, right: LEFT + SIDE, top: TOP, bottom: TOP + SIDE, across: 1.0, up: 1.0 };
    svg.grid(&axes, 1);
    svg.line(LEFT, TOP + SIDE, LEFT + SIDE, TOP, "class=\"axis\" stroke-dasharray=\"4 3\"");
    for bin in &curve.bins {
        let (x, y) = axes.at(bin.predicted, bin.observed);
        svg.dot(
            x,
            y,
            KINDS[0],
            &format!("{} {of}: predicted {:.3}, observed {:.3}", bin.count, bin.predicted, bin.observed),
        );
    }
    svg.text(LEFT + SIDE / 2.0, TOP + SIDE + 40.0, "middle", "", "share that T predicts");
    svg.upright(16.0, TOP + SIDE / 2.0, "observed share");
    format!(
        "<p>For {of}: expected calibration error {:.4} over {} predictions. Predictions on the dashed line are exact.</p>\n{}",
        curve.expected_calibration_error,
        curve.count,
        svg.finish(&format!("Predicted against observed shares of {of}"))
    )
}
