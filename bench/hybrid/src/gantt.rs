//! A Gantt chart of a layer: a line for each rank and level, from the ranks' time stamps. Pure.

use semmoe_profiler::html::{Svg, escape};

use crate::stages::{BETWEEN, EXPERTS, LayerStages, Span};

const LEFT: f64 = 110.0;
const WIDTH: f64 = 900.0;
const LINE: f64 = 24.0;
/// A palette for colour-blind readers (Okabe and Ito).
const COLOURS: [(&str, &str); 5] = [
    ("dispatch", "#d55e00"),
    ("gather", "#009e73"),
    ("experts", "#bbbbbb"),
    ("reduce", "#56b4e9"),
    ("combine", "#cc79a7"),
];

/// The lines of a rank.
const LINES: [&str; 3] = ["between", "inside", "experts"];
/// Height of a rank's lines.
const RANK: f64 = LINES.len() as f64 * LINE + 8.0;

fn line(span: &Span) -> usize {
    match span.stage.as_str() {
        EXPERTS => 2,
        stage if BETWEEN.contains(&stage) => 0,
        _ => 1,
    }
}

/// Draws one layer of all ranks.
pub(crate) fn draw(title: &str, ranks: &[&LayerStages]) -> String {
    let spans = || ranks.iter().flat_map(|rank| &rank.spans);
    let zero = spans().map(|span| span.began).min().unwrap_or_default();
    let end = spans().map(|span| span.ended).max().unwrap_or_default();
    let place = |time: u64| time.saturating_sub(zero) as f64 / (end - zero).max(1) as f64 * WIDTH;
    let bottom = 30.0 + ranks.len() as f64 * RANK;
    let mut svg = Svg::new(1030.0, bottom + 40.0);
    svg.text(4.0, 16.0, "start", "", &format!("{}, {:.1} ms", escape(title), (end - zero) as f64 * 1e-6));
    for (rank, stages) in ranks.iter().enumerate() {
        let top = |line: usize| 30.0 + rank as f64 * RANK + line as f64 * LINE;
        for (at, name) in LINES.into_iter().enumerate() {
            svg.text(4.0, top(at) + 14.0, "start", "", &format!("rank {rank} {name}"));
        }
        for span in &stages.spans {
            let (x, y, wide) = (LEFT + place(span.began), top(line(span)), place(span.ended) - place(span.began));
            let colour = COLOURS.iter().find(|(stage, _)| *stage == span.stage).map_or("#000000", |of| of.1);
            let tip = format!("{} {}", escape(&span.stage), span.piece);
            svg.raw(&format!(
                "<rect x=\"{x:.1}\" y=\"{y}\" width=\"{wide:.1}\" height=\"{}\" fill=\"{colour}\" stroke=\"#fff\"><title>{tip}</title></rect>",
                LINE - 4.0
            ));
        }
    }
    for (at, (stage, colour)) in COLOURS.into_iter().enumerate() {
        let x = LEFT + 120.0 * at as f64;
        svg.dot(x, bottom + 20.0, colour, stage);
        svg.text(x + 16.0, bottom + 24.0, "start", "", stage);
    }
    svg.file()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stage_is_a_bar_inside_the_picture() {
        let span = |stage: &str, piece, began, ended| Span { stage: stage.to_owned(), piece, began, ended };
        let spans = vec![span("gather", 0, 10, 20), span("dispatch", 0, 10, 30), span("experts", 0, 30, 50)];
        let rank = LayerStages { layer: 3, tokens: 1, spans };
        let text = draw("t", &[&rank, &rank]);
        // One rectangle per bar and one for the background; the legend.
        assert_eq!((text.matches("<rect").count(), text.matches("<circle").count()), (6 + 1, 5));
        assert!(text.contains("x=\"110.0\"") && text.contains("width=\"450.0\"") && !text.contains("NaN"));
    }
}
