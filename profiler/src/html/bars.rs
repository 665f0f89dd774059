//! Bar charts of labelled figures.

use super::draw::{KINDS, Svg};
use super::escape;

/// One bar.
#[derive(Debug)]
pub struct Bar {
    /// Text before the bar.
    pub label: String,
    /// Length of the bar in chart units; not negative.
    pub value: f64,
    /// Text after the bar.
    pub shown: String,
    /// Index of its colour in [`KINDS`].
    pub kind: usize,
}

/// A line across all bars.
#[derive(Debug)]
pub struct Mark<'a> {
    /// Position of the line on the axis.
    pub value: f64,
    /// Meaning of the line.
    pub label: &'a str,
}

const LEFT: f64 = 210.0;
const WIDTH: f64 = 420.0;
const ROW: f64 = 20.0;
const TOP: f64 = 24.0;

/// Draws bars on an axis from 0 to `most`; `label` is the chart's text description.
pub fn bars(label: &str, bars: &[Bar], most: f64, mark: Option<&Mark<'_>>) -> String {
    let most = if most > 0.0 { most } else { 1.0 };
    let bottom = TOP + ROW * bars.len() as f64;
    let mut svg = Svg::new(LEFT + WIDTH + 290.0, bottom + 10.0);
    for (at, bar) in bars.iter().enumerate() {
        let top = TOP + at as f64 * ROW;
        let wide = (bar.value / most).clamp(0.0, 1.0) * WIDTH;
        svg.text(LEFT - 8.0, top + 14.0, "end", "", &escape(&bar.label));
        svg.raw(&format!(
            "<rect x=\"{LEFT}\" y=\"{:.1}\" width=\"{wide:.1}\" height=\"{:.1}\" fill=\"{}\"/>",
            top + 3.0,
            ROW - 6.0,
            KINDS[bar.kind % KINDS.len()]
        ));
        svg.text(LEFT + wide + 8.0, top + 14.0, "start", "", &escape(&bar.shown));
        svg.tip(LEFT, top, WIDTH, ROW, &format!("{}: {}", bar.label, bar.shown));
    }
    svg.line(LEFT, TOP, LEFT, bottom, "class=\"axis\"");
    if let Some(mark) = mark {
        let x = LEFT + (mark.value / most).clamp(0.0, 1.0) * WIDTH;
        svg.line(x, TOP - 4.0, x, bottom, "class=\"axis\" stroke-dasharray=\"4 3\"");
        svg.text(x, TOP - 9.0, "middle", "", &escape(mark.label));
    }
    svg.finish(label)
}
