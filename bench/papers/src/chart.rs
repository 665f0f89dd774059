//! Charts as SVG: panels side by side, points with or without lines, a legend. Pure.

use semmoe_profiler::html::{KINDS, Svg, escape};

/// One chart.
#[derive(Clone, Debug, Default)]
pub struct Panel {
    /// The heading.
    pub title: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// Points of each kind.
    pub series: Vec<Series>,
}

/// An axis: label and scale.
#[derive(Clone, Debug, Default)]
pub struct Axis {
    /// The quantity, with its unit.
    pub label: String,
    /// A logarithmic axis; values must be above 0.
    pub log: bool,
}

/// Points of one kind.
#[derive(Clone, Debug, Default)]
pub struct Series {
    /// For the legend.
    pub name: String,
    /// In drawing order.
    pub points: Vec<(f64, f64)>,
    /// Ends of a thin fitted line; does not extend the axes.
    pub fitted: Vec<(f64, f64)>,
    /// Whether points are joined in order.
    pub line: bool,
    /// Whether points get markers.
    pub marks: bool,
}

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 320.0;
const LEFT: f64 = 66.0;
const TOP: f64 = 34.0;
const PLOT_WIDTH: f64 = WIDTH - LEFT - 18.0;
const PLOT_HEIGHT: f64 = HEIGHT - TOP - 52.0;
const BOTTOM: f64 = TOP + PLOT_HEIGHT;
/// Approximate number of ticks on an axis.
const TICKS: f64 = 5.0;

/// Draws panels side by side.
pub fn draw(panels: &[Panel]) -> String {
    let legend = 18.0 * panels.iter().map(|panel| panel.series.len()).max().unwrap_or(0) as f64 + 8.0;
    let mut svg = Svg::new(WIDTH * panels.len() as f64, HEIGHT + legend);
    for (at, panel) in panels.iter().enumerate() {
        draw_panel(panel, WIDTH * at as f64 + LEFT, &mut svg);
    }
    svg.file()
}

/// Draws a panel whose plot begins at `left`.
fn draw_panel(panel: &Panel, left: f64, svg: &mut Svg) {
    let all = || panel.series.iter().flat_map(|series| &series.points).filter(|point| panel.shows(point));
    let (x, y) = (Scale::of(all().map(|p| p.0), panel.x.log), Scale::of(all().map(|p| p.1), panel.y.log));
    let px = |value: f64| left + x.place(value) * PLOT_WIDTH;
    let py = |value: f64| TOP + (1.0 - y.place(value)) * PLOT_HEIGHT;
    let (right, middle) = (left + PLOT_WIDTH, left + PLOT_WIDTH / 2.0);
    svg.text(middle, 20.0, "middle", "", &escape(&panel.title));
    for tick in x.ticks() {
        svg.line(px(tick), TOP, px(tick), BOTTOM, "stroke=\"#ddd\"");
        svg.text(px(tick), BOTTOM + 16.0, "middle", "", &shown(tick));
    }
    for tick in y.ticks() {
        svg.line(left, py(tick), right, py(tick), "stroke=\"#ddd\"");
        svg.text(left - 6.0, py(tick) + 4.0, "end", "", &shown(tick));
    }
    svg.line(left, TOP, left, BOTTOM, "stroke=\"#444\"");
    svg.line(left, BOTTOM, right, BOTTOM, "stroke=\"#444\"");
    svg.text(middle, BOTTOM + 36.0, "middle", "", &escape(&panel.x.label));
    svg.upright(left - LEFT + 16.0, TOP + PLOT_HEIGHT / 2.0, &escape(&panel.y.label));
    for (at, series) in panel.series.iter().enumerate() {
        let colour = KINDS[at % KINDS.len()];
        let stroke = format!("stroke=\"{colour}\" stroke-width=\"1.5\"");
        let placed = |points: &[(f64, f64)]| -> Vec<(f64, f64)> {
            points.iter().filter(|point| panel.shows(point)).map(|point| (px(point.0), py(point.1))).collect()
        };
        let points = placed(&series.points);
        if series.line {
            points.windows(2).for_each(|two| svg.line(two[0].0, two[0].1, two[1].0, two[1].1, &stroke));
        }
        points.iter().filter(|_| series.marks).for_each(|(x, y)| svg.dot(*x, *y, colour, ""));
        if let [(x, y), .., (to_x, to_y)] = placed(&series.fitted)[..] {
            svg.line(x, y, to_x, to_y, &stroke);
        }
        let row = HEIGHT + 18.0 * at as f64 + 6.0;
        svg.dot(left, row, colour, "");
        svg.text(left + 10.0, row + 4.0, "start", "", &escape(&series.name));
    }
}

impl Panel {
    /// Whether a point can be drawn on both axes.
    fn shows(&self, (x, y): &(f64, f64)) -> bool {
        let on = |axis: &Axis, value: f64| value.is_finite() && (!axis.log || value > 0.0);
        on(&self.x, *x) && on(&self.y, *y)
    }
}

/// Maps values to positions between 0 and 1.
struct Scale {
    low: f64,
    high: f64,
    log: bool,
}

impl Scale {
    /// A range with some margin around all values; 0 to 1 (1 to 10 if logarithmic) without any.
    fn of(values: impl Iterator<Item = f64>, log: bool) -> Self {
        let (low, high) = values
            .map(|value| if log { value.log10() } else { value })
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        if low > high {
            return Self { low: 0.0, high: 1.0, log };
        }
        let margin = ((high - low) * 0.06).max(high.abs().max(low.abs()) * 1e-3).max(1e-9);
        Self { low: low - margin, high: high + margin, log }
    }

    fn place(&self, value: f64) -> f64 {
        ((if self.log { value.log10() } else { value }) - self.low) / (self.high - self.low)
    }

    /// Round values; on a logarithmic axis 1, 2 and 5 times powers of ten.
    fn ticks(&self) -> Vec<f64> {
        if self.log {
            let powers = self.low.floor() as i32..=self.high.ceil() as i32;
            let all = powers.flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(power)));
            return all.filter(|tick| (0.0..=1.0).contains(&self.place(*tick))).collect();
        }
        let rough = (self.high - self.low) / TICKS;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power).into_iter().find(|step| *step >= rough);
        let step = step.unwrap_or(10.0 * power);
        let first = (self.low / step).ceil() as i64;
        (0..20).map(|at| (first + at) as f64 * step).take_while(|tick| *tick <= self.high).collect()
    }
}

/// Three digits at most.
fn shown(value: f64) -> String {
    let digits =
        if value.abs() >= 100.0 || value == 0.0 { 0 } else { (2 - value.abs().log10().floor() as i32).clamp(0, 6) };
    let text = format!("{value:.*}", digits as usize);
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const VALUE: std::ops::Range<f64> = -1e12..1e12;

    fn panel(points: Vec<(f64, f64)>, log: bool) -> Panel {
        let axis = |label: &str| Axis { label: label.to_owned(), log };
        let series = Series { name: "a < b & c".to_owned(), points, line: true, marks: true, ..Series::default() };
        Panel { title: "t".to_owned(), x: axis("x"), y: axis("y"), series: vec![series] }
    }

    #[test]
    fn ends_of_the_data_are_inside_and_text_is_escaped() {
        let text = draw(&[panel(vec![(0.25, 10.0), (0.5, 4.0)], false)]);
        assert!(text.contains("a &lt; b &amp; c") && !text.contains("a < b"));
        // Two markers and one in the legend.
        assert_eq!(text.matches("<circle").count(), 3);
        let scale = Scale::of([0.25, 0.5].into_iter(), false);
        assert!(scale.place(0.25) > 0.0 && scale.place(0.5) < 1.0);
        let ticks: Vec<String> = scale.ticks().into_iter().map(shown).collect();
        assert_eq!(ticks, ["0.3", "0.4", "0.5"]);
    }

    #[test]
    fn logarithmic_axes_have_round_ticks_and_no_zero() {
        let scale = Scale::of([30.0, 700.0].into_iter(), true);
        assert_eq!(scale.ticks(), [50.0, 100.0, 200.0, 500.0]);
        let text = draw(&[panel(vec![(0.0, 1.0), (10.0, 100.0)], true)]);
        assert_eq!(text.matches("<circle").count(), 2, "{text}");
    }

    #[test]
    fn numbers_are_short() {
        for (value, expected) in
            [(0.0, "0"), (1234.0, "1234"), (0.25, "0.25"), (0.30000000000000004, "0.3"), (12.5, "12.5")]
        {
            assert_eq!(shown(value), expected);
        }
    }

    proptest! {
        #[test]
        fn any_points_are_drawn_or_left_out(points in proptest::collection::vec((VALUE, VALUE), 0..8), log: bool) {
            let odd = [(f64::NAN, 1.0), (1.0, f64::INFINITY), (0.0, 0.0), (1e-300, 1e-300)];
            let points = points.into_iter().chain(odd).collect();
            let text = draw(&[panel(points, log), Panel::default()]);
            prop_assert!(text.starts_with("<svg") && text.ends_with("</svg>\n"));
            prop_assert!(!text.contains("NaN"));
        }
    }
}
