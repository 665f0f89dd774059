//! Draws a layer's experts given the experts of the previous layer: the paper's figure 6 (c).

use super::draw::{Cells, Scale, Svg};
use crate::show::Study;

const LEFT: f64 = 60.0;
const TOP: f64 = 44.0;

pub(super) fn picture(study: &Study, layer: usize) -> String {
    let Some(next) = study.next.get(layer.min(study.next.len().saturating_sub(1))) else {
        return "<p class=\"none\">Not drawn: there is only one layer.</p>".into();
    };
    let experts = next.pairs.len();
    let cell = (520.0 / experts as f64).clamp(2.5, 28.0);
    let total: f64 = next.pairs.iter().flatten().sum();
    let columns: Vec<f64> =
        (0..experts).map(|to| next.pairs.iter().map(|row| row[to]).sum::<f64>() / total.max(1.0)).collect();
    let lift = |row: &Vec<f64>| {
        let sum: f64 = row.iter().sum();
        let of = |(count, chance): (&f64, &f64)| {
            if sum > 0.0 && *chance > 0.0 { (count / sum / chance).max(0.125).log2() } else { 0.0 }
        };
        row.iter().zip(&columns).map(of).collect::<Vec<f64>>()
    };
    let cells: Vec<Vec<f64>> = next.pairs.iter().map(lift).collect();
    let side = cell * experts as f64;
    let mut svg = Svg::new((LEFT + side + 20.0).max(420.0), TOP + side + 60.0);
    let cells = Cells { x: LEFT, y: TOP, wide: cell, high: cell, rows: &cells, scale: Scale::Around(3.0) };
    svg.cells(&cells);
    svg.tips(&cells, |row, column| {
        let (from, to, lifts) = (next.from_layer, next.to_layer, &cells.rows[row]);
        let best = (0..experts).max_by(|a, b| lifts[*a].total_cmp(&lifts[*b])).unwrap_or(0);
        let (at, most) = column.map_or((best, "most often "), |column| (column, ""));
        format!("expert {row} of layer {from}, then {most}expert {at} of layer {to}: {:.2} x chance", lifts[at].exp2())
    });
    svg.numbers(LEFT, TOP, cell, experts, &format!("experts of layer {}", next.to_layer));
    let every = (14.0 / cell).ceil().max(1.0) as usize;
    for at in (0..experts).step_by(every) {
        svg.text(LEFT - 6.0, TOP + (at as f64 + 0.5) * cell + 4.0, "end", "", &at.to_string());
    }
    svg.upright(16.0, TOP + side / 2.0, &format!("experts of layer {}", next.from_layer));
    svg.legend(
        LEFT,
        TOP + side + 26.0,
        Scale::Around(3.0),
        "how often the expert follows, relative to chance",
        ["1/8 or less", "1", "8 or more"],
    );
    let basis = if next.seen_together {
        "as observed token by token"
    } else {
        "as estimated from each token's counts: a profile does not record which experts occurred together"
    };
    let label =
        format!("Map of how often experts of layer {} follow those of layer {}", next.to_layer, next.from_layer);
    format!(
        "<p>Which experts of layer {} follow which experts of layer {}, {basis}.</p>\n{}",
        next.to_layer,
        next.from_layer,
        svg.finish(&label),
    )
}

/// Renders the figures for all pairs of layers.
pub(super) fn table(study: &Study) -> String {
    if study.next.is_empty() {
        return String::new();
    }
    let figures = study.next.iter().map(|next| {
        format!(
            "<tr><th>{} to {}</th><td>{:.3}</td><td>{:.3}</td></tr>",
            next.from_layer, next.to_layer, next.share, next.by_chance
        )
    });
    format!(
        "<p>Share of a layer's activations on the top-k experts that most often follow the previous layer's expert, compared with chance:</p>\n\
         <div class=\"wide\"><table><thead><tr><th>layers</th><th>share</th><th>by chance</th></tr></thead><tbody>{}</tbody></table></div>\n",
        figures.collect::<String>()
    )
}
