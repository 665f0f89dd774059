//! The HTML page for a plan: the Pareto front as an image and the ranked list as a table.

use std::path::Path;

use semmoe_planner::report::Answer;
use semmoe_planner::search::FrontPoint;
use semmoe_profiler::html::{Axes, KINDS, Svg, escape, write_sections};

use crate::commands::profile::failure;
use crate::error::CliError;

/// Rows of the table.
const ROWS: usize = 40;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 640.0;
const TOP: f64 = 20.0;
const BOTTOM: f64 = 380.0;

pub(super) fn write(path: &Path, model: &str, answer: &Answer<'_>) -> Result<(), CliError> {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = answer.write(ROWS, true, &mut text);
    let sections = [
        ("Speed against throughput", picture(&answer.plan.front)),
        ("The plan", format!("<pre>{}</pre>\n", lines(&text))),
    ];
    write_sections(path, &format!("Plan for {model}"), &sections).map_err(failure)
}

/// Escapes each line separately, because `escape` would print line breaks as text.
fn lines(text: &str) -> String {
    text.lines().map(escape).collect::<Vec<_>>().join("\n")
}

fn picture(front: &[FrontPoint]) -> String {
    let most = |of: fn(&FrontPoint) -> f64| front.iter().map(of).fold(f64::MIN_POSITIVE, f64::max);
    let (wide, high) = (most(|point| point.user_tokens_per_second), most(|point| point.gpu_tokens_per_second));
    let axes = Axes { left: LEFT, right: RIGHT, top: TOP, bottom: BOTTOM, across: wide, up: high };
    let mut svg = Svg::new(RIGHT + 260.0, BOTTOM + 50.0);
    svg.grid(&axes, 0);
    let name = |point: &FrontPoint| format!("{} x {}", point.units, point.layout.name());
    let mut names: Vec<String> = Vec::new();
    for point in front {
        if !names.contains(&name(point)) {
            names.push(name(point));
        }
        let kind = names.iter().position(|known| *known == name(point)).unwrap_or(0);
        let (x, y) = axes.at(point.user_tokens_per_second, point.gpu_tokens_per_second);
        svg.dot(x, y, KINDS[kind % KINDS.len()], &name(point));
    }
    for (at, name) in names.iter().enumerate().take(KINDS.len()) {
        let row = TOP + 14.0 + at as f64 * 20.0;
        svg.dot(RIGHT + 20.0, row - 4.0, KINDS[at], name);
        svg.text(RIGHT + 30.0, row, "start", "", &escape(name));
    }
    svg.text((LEFT + RIGHT) / 2.0, BOTTOM + 40.0, "middle", "", "tokens/s per user");
    svg.upright(16.0, (TOP + BOTTOM) / 2.0, "tokens/s per GPU");
    format!(
        "<p>Each point is a layout at a given number of requests in flight; no other is better in both respects. All figures are modelled.</p>\n{}",
        svg.finish("Throughput per GPU against speed per user")
    )
}
