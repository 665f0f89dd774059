//! SVG: cells, axes, legends, and colours that colour-blind people tell apart.

use std::fmt::Write;

/// Dark to light to dark shows best in print: from white to dark blue, in steps of about equal lightness.
const SEQUENTIAL: [[f64; 3]; 5] =
    [[255.0, 255.0, 255.0], [190.0, 215.0, 235.0], [90.0, 160.0, 205.0], [25.0, 95.0, 165.0], [8.0, 35.0, 90.0]];
/// Blue below, orange above: the pair that all common kinds of colour blindness tell apart.
const DIVERGING: [[f64; 3]; 5] =
    [[5.0, 70.0, 150.0], [120.0, 175.0, 220.0], [250.0, 250.0, 250.0], [245.0, 170.0, 90.0], [170.0, 75.0, 0.0]];
/// Okabe and Ito's, without yellow and black.
pub const KINDS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"];
/// Colours that cells are rounded to.
const STEPS: usize = 24;

/// A picture being drawn; everything in pixels.
pub struct Svg {
    width: f64,
    height: f64,
    body: String,
}

/// How values become colours.
#[derive(Clone, Copy)]
pub(super) enum Scale {
    /// From 0 (white) to this.
    Up(f64),
    /// From minus this to this, 0 in the middle.
    Around(f64),
}

impl Scale {
    fn step(self, value: f64) -> usize {
        let share = match self {
            Self::Up(most) => value / most,
            Self::Around(most) => 0.5 + 0.5 * value / most,
        };
        let share = if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 };
        (share * (STEPS - 1) as f64).round() as usize
    }

    fn colour(self, step: usize) -> String {
        let stops = match self {
            Self::Up(_) => SEQUENTIAL,
            Self::Around(_) => DIVERGING,
        };
        let place = step as f64 / (STEPS - 1) as f64 * (stops.len() - 1) as f64;
        let (low, part) = (place.floor() as usize, place.fract());
        let high = (low + 1).min(stops.len() - 1);
        let mixed =
            [0, 1, 2].map(|channel| (stops[low][channel] * (1.0 - part) + stops[high][channel] * part).round() as u8);
        format!("#{:02x}{:02x}{:02x}", mixed[0], mixed[1], mixed[2])
    }
}

impl Svg {
    /// An empty picture of this size.
    pub fn new(width: f64, height: f64) -> Self {
        Self { width, height, body: String::new() }
    }

    /// Ready for the page; `label` says in words what is drawn.
    pub fn finish(self, label: &str) -> String {
        let Self { width, height, body } = self;
        let label = super::escape(label);
        format!(
            "<figure><svg role=\"img\" aria-label=\"{label}\" width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {width:.0} {height:.0}\">\
             {body}</svg></figure>\n"
        )
    }

    /// Text that is safe already.
    pub fn text(&mut self, (x, y): (f64, f64), anchor: &str, class: &str, text: &str) {
        let _ = write!(
            self.body,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" class=\"{class}\">{text}</text>"
        );
    }

    /// The same turned by a quarter, for vertical axes.
    pub fn upright(&mut self, (x, y): (f64, f64), text: &str) {
        let _ = write!(
            self.body,
            "<text transform=\"translate({x:.1} {y:.1}) rotate(-90)\" text-anchor=\"middle\">{text}</text>"
        );
    }

    /// A straight line; `style` is markup.
    pub fn line(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), style: &str) {
        let _ = write!(self.body, "<path d=\"M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}\" fill=\"none\" {style}/>");
    }

    /// Markup that is safe already.
    pub fn raw(&mut self, markup: &str) {
        self.body.push_str(markup);
    }

    /// Cells of equal size, row by row, neighbours of one colour drawn at once.
    pub(super) fn cells(&mut self, (x, y): (f64, f64), (wide, high): (f64, f64), rows: &[Vec<f64>], scale: Scale) {
        let mut paths = vec![String::new(); STEPS];
        for (row, values) in rows.iter().enumerate() {
            let top = y + row as f64 * high;
            let mut from = 0;
            while from < values.len() {
                let step = scale.step(values[from]);
                let length = values[from..].iter().take_while(|value| scale.step(**value) == step).count();
                let (left, run) = (x + from as f64 * wide, length as f64 * wide);
                let _ = write!(paths[step], "M{left:.1} {top:.1}h{run:.1}v{high:.1}h{:.1}z", -run);
                from += length;
            }
        }
        for (step, path) in paths.iter().enumerate().filter(|(_, path)| !path.is_empty()) {
            let _ = write!(
                self.body,
                "<path fill=\"{}\" shape-rendering=\"crispEdges\" d=\"{path}\"/>",
                scale.colour(step)
            );
        }
        let (right, bottom) = (x + rows.first().map_or(0, Vec::len) as f64 * wide, y + rows.len() as f64 * high);
        let _ = write!(
            self.body,
            "<path fill=\"none\" stroke=\"#888\" d=\"M{x:.1} {y:.1}H{right:.1}V{bottom:.1}H{x:.1}z\"/>"
        );
    }

    /// What the colours mean, with values at the ends and in the middle.
    pub(super) fn legend(&mut self, (x, y): (f64, f64), scale: Scale, title: &str, marks: [&str; 3]) {
        const WIDTH: f64 = 240.0;
        let values = (0..STEPS).map(|step| {
            let share = step as f64 / (STEPS - 1) as f64;
            match scale {
                Scale::Up(most) => share * most,
                Scale::Around(most) => (2.0 * share - 1.0) * most,
            }
        });
        self.text((x, y - 5.0), "start", "", title);
        self.cells((x, y), (WIDTH / STEPS as f64, 10.0), &[values.collect()], scale);
        for (at, (anchor, mark)) in [("start", marks[0]), ("middle", marks[1]), ("end", marks[2])].iter().enumerate() {
            self.text((x + at as f64 * WIDTH / 2.0, y + 22.0), anchor, "", mark);
        }
    }

    /// Numbers along the top of columns, no closer than they can be read.
    pub(super) fn columns(&mut self, (x, y): (f64, f64), wide: f64, labels: &[String]) {
        let longest = labels.iter().map(String::len).max().unwrap_or(1) as f64 * 6.5 + 6.0;
        let every = (longest / wide).ceil().max(1.0) as usize;
        for (at, label) in labels.iter().enumerate().step_by(every) {
            self.text((x + (at as f64 + 0.5) * wide, y), "middle", "", label);
        }
    }
}
