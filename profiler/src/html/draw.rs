//! SVG drawing: cells, axes, legends, tooltips, and colours distinguishable for colour-blind people, in light and dark
//! mode.

use std::fmt::Write;

type Stops = [[f64; 3]; 5];
/// Colours from the page's background to the strongest, with evenly spaced lightness: for light and for dark pages.
const SEQUENTIAL: [Stops; 2] = [
    [[255.0, 255.0, 255.0], [190.0, 215.0, 235.0], [90.0, 160.0, 205.0], [25.0, 95.0, 165.0], [8.0, 35.0, 90.0]],
    [[24.0, 26.0, 30.0], [20.0, 58.0, 95.0], [30.0, 105.0, 165.0], [105.0, 175.0, 225.0], [225.0, 242.0, 255.0]],
];
/// Blue below the centre, orange above it: distinguishable with all common kinds of colour blindness.
const DIVERGING: [Stops; 2] = [
    [[5.0, 70.0, 150.0], [120.0, 175.0, 220.0], [250.0, 250.0, 250.0], [245.0, 170.0, 90.0], [170.0, 75.0, 0.0]],
    [[120.0, 190.0, 255.0], [45.0, 95.0, 145.0], [34.0, 36.0, 40.0], [150.0, 90.0, 30.0], [255.0, 175.0, 90.0]],
];
/// The palette of Okabe and Ito, without yellow and black.
pub const KINDS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"];
/// Number of colour steps for cells.
const STEPS: usize = 24;
/// Beyond this many cells, each tooltip covers an entire row.
const MAX_CELL_TIPS: usize = 600;

/// An image being drawn; all lengths in pixels.
pub struct Svg {
    width: f64,
    height: f64,
    body: String,
}

/// Maps values to colours.
#[derive(Clone, Copy)]
pub enum Scale {
    /// From 0 (the background colour) to this value.
    Up(f64),
    /// From minus this value to this value, centred on 0.
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

    /// Returns the first letter of a cell's CSS class; the colour step follows.
    fn prefix(self) -> char {
        match self {
            Self::Up(_) => 'u',
            Self::Around(_) => 'd',
        }
    }
}

/// Returns the CSS rules for all steps of both scales; `dark` selects dark mode.
pub(super) fn palette(dark: bool) -> String {
    let scales = [('u', SEQUENTIAL), ('d', DIVERGING)];
    let rule = |(prefix, stops): (char, [Stops; 2]), step| {
        format!(".{prefix}{step}{{fill:{}}}", mixed(&stops[usize::from(dark)], step))
    };
    scales.into_iter().flat_map(|scale| (0..STEPS).map(move |step| rule(scale, step))).collect()
}

fn mixed(stops: &Stops, step: usize) -> String {
    let place = step as f64 / (STEPS - 1) as f64 * (stops.len() - 1) as f64;
    let (low, part) = (place.floor() as usize, place.fract());
    let high = (low + 1).min(stops.len() - 1);
    let of = |channel: usize| (stops[low][channel] * (1.0 - part) + stops[high][channel] * part).round() as u8;
    format!("#{:02x}{:02x}{:02x}", of(0), of(1), of(2))
}

/// A grid of values to draw, with its position and colour scale.
pub struct Cells<'a> {
    /// Left edge of the cells.
    pub x: f64,
    /// Upper edge of the cells.
    pub y: f64,
    /// Width of a cell.
    pub wide: f64,
    /// Height of a cell.
    pub high: f64,
    /// Rows of equal length.
    pub rows: &'a [Vec<f64>],
    /// The colour scale for the values.
    pub scale: Scale,
}

impl Cells<'_> {
    fn columns(&self) -> usize {
        self.rows.first().map_or(0, Vec::len)
    }
}

/// The axes of a diagram whose origin is in the lower left corner.
pub struct Axes {
    /// Pixel position of the left edge.
    pub left: f64,
    /// Pixel position of the right edge.
    pub right: f64,
    /// Pixel position of the upper edge.
    pub top: f64,
    /// Pixel position of the lower edge.
    pub bottom: f64,
    /// Maximum value on the horizontal axis.
    pub across: f64,
    /// Maximum value on the vertical axis.
    pub up: f64,
}

impl Axes {
    /// Returns a point's pixel position.
    pub fn at(&self, x: f64, y: f64) -> (f64, f64) {
        let Self { left, right, top, bottom, across, up } = self;
        (left + x / across * (right - left), bottom - y / up * (bottom - top))
    }
}

impl Svg {
    /// Creates an empty image of this size.
    pub fn new(width: f64, height: f64) -> Self {
        Self { width, height, body: String::new() }
    }

    /// Returns the image as markup for the page; `label` is its text description.
    pub fn finish(self, label: &str) -> String {
        let Self { width, height, body } = self;
        let label = super::escape(label);
        format!(
            "<figure><svg role=\"img\" aria-label=\"{label}\" width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {width:.0} {height:.0}\">\
             {body}</svg></figure>\n"
        )
    }

    /// Returns the image as a standalone SVG file with a white background.
    pub fn file(self) -> String {
        let Self { width, height, body } = self;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {width:.0} {height:.0}\" \
             font-family=\"sans-serif\" font-size=\"12\"><rect width=\"100%\" height=\"100%\" fill=\"white\"/>{body}</svg>\n"
        )
    }

    /// Adds text that is already escaped.
    pub fn text(&mut self, x: f64, y: f64, anchor: &str, class: &str, text: &str) {
        let _ = write!(
            self.body,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" class=\"{class}\">{text}</text>"
        );
    }

    /// Adds text rotated by 90 degrees, for vertical axes.
    pub fn upright(&mut self, x: f64, y: f64, text: &str) {
        let _ = write!(
            self.body,
            "<text transform=\"translate({x:.1} {y:.1}) rotate(-90)\" text-anchor=\"middle\">{text}</text>"
        );
    }

    /// Adds a straight line; `style` is markup.
    pub fn line(&mut self, x1: f64, y1: f64, x2: f64, y2: f64, style: &str) {
        let _ = write!(self.body, "<path d=\"M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}\" fill=\"none\" {style}/>");
    }

    /// Adds horizontal grid lines at every fifth of the vertical axis, and values at every fifth of both axes.
    pub fn grid(&mut self, axes: &Axes, decimals: usize) {
        for share in (0..=5).map(|tick| f64::from(tick) / 5.0) {
            let (across, up) = (share * axes.across, share * axes.up);
            let (x, y) = axes.at(across, up);
            self.line(axes.left, y, axes.right, y, "class=\"grid\"");
            self.text(axes.left - 6.0, y + 4.0, "end", "", &format!("{up:.decimals$}"));
            self.text(x, axes.bottom + 18.0, "middle", "", &format!("{across:.decimals$}"));
        }
    }

    /// Adds markup that is already safe.
    pub fn raw(&mut self, markup: &str) {
        self.body.push_str(markup);
    }

    /// Adds a point with a tooltip.
    pub fn dot(&mut self, x: f64, y: f64, colour: &str, tip: &str) {
        let tip = super::escape(tip);
        let _ = write!(
            self.body,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{colour}\"><title>{tip}</title></circle>"
        );
    }

    /// Adds a tooltip to an area.
    pub fn tip(&mut self, x: f64, y: f64, wide: f64, high: f64, tip: &str) {
        let tip = super::escape(tip);
        let _ = write!(
            self.body,
            "<rect class=\"tip\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{wide:.1}\" height=\"{high:.1}\"><title>{tip}</title></rect>"
        );
    }

    /// Adds cells of equal size row by row, merging adjacent cells of the same colour.
    pub fn cells(&mut self, cells: &Cells<'_>) {
        let Cells { x, y, wide, high, rows, scale } = *cells;
        let mut paths = vec![String::new(); STEPS];
        for (row, values) in rows.iter().enumerate() {
            let mut from = 0;
            while from < values.len() {
                let step = scale.step(values[from]);
                let length = values[from..].iter().take_while(|value| scale.step(**value) == step).count();
                let _ = write!(paths[step], "M{from} {row}h{length}v1h-{length}z");
                from += length;
            }
        }
        let _ = write!(
            self.body,
            "<g shape-rendering=\"crispEdges\" transform=\"translate({x:.1} {y:.1}) scale({wide:.3} {high:.3})\">"
        );
        for (step, path) in paths.iter().enumerate().filter(|(_, path)| !path.is_empty()) {
            let _ = write!(self.body, "<path class=\"{}{step}\" d=\"{path}\"/>", scale.prefix());
        }
        let (wide, high) = (cells.columns() as f64 * wide, rows.len() as f64 * high);
        let _ = write!(
            self.body,
            "</g><rect fill=\"none\" stroke=\"#888\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{wide:.1}\" height=\"{high:.1}\"/>"
        );
    }

    /// Adds tooltips to cells. `text` receives a row and a column, or only the row if there are too many cells.
    pub fn tips(&mut self, cells: &Cells<'_>, text: impl Fn(usize, Option<usize>) -> String) {
        let Cells { x, y, wide, high, rows, .. } = *cells;
        let columns = cells.columns();
        for row in 0..rows.len() {
            let top = y + row as f64 * high;
            if columns * rows.len() > MAX_CELL_TIPS {
                self.tip(x, top, columns as f64 * wide, high, &text(row, None));
                continue;
            }
            for column in 0..columns {
                self.tip(x + column as f64 * wide, top, wide, high, &text(row, Some(column)));
            }
        }
    }

    /// Labels the rows as layers and adds a colour legend below.
    pub fn layers(&mut self, x: f64, top: f64, bottom: f64, scale: Scale, title: &str, marks: [&str; 3]) {
        self.upright(14.0, (top + bottom) / 2.0, "layer");
        self.legend(x, bottom + 26.0, scale, title, marks);
    }

    /// Adds a colour legend with marks at both ends and in the middle.
    pub fn legend(&mut self, x: f64, y: f64, scale: Scale, title: &str, marks: [&str; 3]) {
        const WIDTH: f64 = 240.0;
        let values = (0..STEPS).map(|step| {
            let share = step as f64 / (STEPS - 1) as f64;
            match scale {
                Scale::Up(most) => share * most,
                Scale::Around(most) => (2.0 * share - 1.0) * most,
            }
        });
        self.text(x, y - 5.0, "start", "", title);
        self.cells(&Cells { x, y, wide: WIDTH / STEPS as f64, high: 10.0, rows: &[values.collect()], scale });
        for (at, (anchor, mark)) in [("start", marks[0]), ("middle", marks[1]), ("end", marks[2])].iter().enumerate() {
            self.text(x + at as f64 * WIDTH / 2.0, y + 22.0, anchor, "", mark);
        }
    }

    /// Numbers columns from 0 above the cells at `x` and `y`, with a title above the numbers.
    pub fn numbers(&mut self, x: f64, y: f64, wide: f64, count: usize, title: &str) {
        self.text(x, 12.0, "start", "", title);
        self.columns(x, y - 6.0, wide, &(0..count).map(|at| at.to_string()).collect::<Vec<_>>());
    }

    /// Labels columns at the top, skipping labels that would overlap.
    pub fn columns(&mut self, x: f64, y: f64, wide: f64, labels: &[String]) {
        let longest = labels.iter().map(String::len).max().unwrap_or(1) as f64 * 6.5 + 6.0;
        let every = (longest / wide).ceil().max(1.0) as usize;
        for (at, label) in labels.iter().enumerate().step_by(every) {
            self.text(x + (at as f64 + 0.5) * wide, y, "middle", "", label);
        }
    }
}
