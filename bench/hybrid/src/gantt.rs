//! A layer as bars: a line for each rank and level, from its own time stamps. Pure.

use std::fmt::Write as _;

use crate::stages::{BETWEEN, EXPERTS, LayerStages, Span};

const LEFT: f64 = 110.0;
const WIDTH: f64 = 900.0;
const LINE: usize = 24;
/// A palette for all kinds of colour vision (Okabe and Ito).
const COLOURS: [(&str, &str); 5] = [
    ("dispatch", "#d55e00"),
    ("gather", "#009e73"),
    ("experts", "#bbbbbb"),
    ("reduce", "#56b4e9"),
    ("combine", "#cc79a7"),
];

/// The lines of a rank.
const LINES: [&str; 3] = ["between", "inside", "experts"];

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
    let bottom = 30 + ranks.len() * (LINES.len() * LINE + 8);
    let mut svg = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"1030\" height=\"{}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"4\" y=\"16\">{title}, {:.1} ms</text>",
        bottom + 40,
        (end - zero) as f64 * 1e-6
    );
    for (rank, stages) in ranks.iter().enumerate() {
        let top = |line: usize| 30 + rank * (LINES.len() * LINE + 8) + line * LINE;
        for (at, name) in LINES.into_iter().enumerate() {
            let _ = writeln!(svg, "<text x=\"4\" y=\"{}\">rank {rank} {name}</text>", top(at) + 14);
        }
        for span in &stages.spans {
            let (x, y) = (LEFT + place(span.began), top(line(span)));
            let width = place(span.ended) - place(span.began);
            let colour = COLOURS.iter().find(|(stage, _)| *stage == span.stage).map_or("#000000", |of| of.1);
            let _ = writeln!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"{}\" fill=\"{colour}\" stroke=\"#fff\"><title>{} {}</title></rect>",
                LINE - 4,
                span.stage,
                span.piece
            );
        }
    }
    for (at, (stage, colour)) in COLOURS.into_iter().enumerate() {
        let x = LEFT + 120.0 * at as f64;
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"{}\" width=\"12\" height=\"12\" fill=\"{colour}\"/><text x=\"{}\" y=\"{}\">{stage}</text>",
            bottom + 14,
            x + 16.0,
            bottom + 24
        );
    }
    svg + "</svg>\n"
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
        // A bar each, the ground, the legend.
        assert_eq!(text.matches("<rect").count(), 6 + 1 + 5);
        assert!(text.contains("x=\"110.0\"") && text.contains("width=\"450.0\"") && !text.contains("NaN"));
    }
}
