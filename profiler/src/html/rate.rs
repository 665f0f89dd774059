//! Local activation rate against groups.

use super::draw::{KINDS, Svg};

/// What tables for a number of groups are worth.
#[derive(Clone, Debug)]
pub struct RatePoint {
    /// G.
    pub groups: u16,
    /// Local activation rate with the tables.
    pub rate: f64,
    /// The same with tokens on random ranks.
    pub random: f64,
    /// Whether it was judged on data that were not solved on.
    pub held_out: bool,
}

const LEFT: f64 = 60.0;
const RIGHT: f64 = 560.0;
const TOP: f64 = 20.0;
const BOTTOM: f64 = 320.0;

/// Name, figure and dashes of a line.
type Series<'a> = (&'a str, &'a dyn Fn(&RatePoint) -> f64, &'a str);

pub(super) fn picture(points: &[RatePoint]) -> String {
    let mut points = points.to_vec();
    points.sort_by_key(|point| point.groups);
    let last = (points.len().max(2) - 1) as f64;
    let x = |at: usize| LEFT + 30.0 + at as f64 / last * (RIGHT - LEFT - 60.0);
    let y = |rate: f64| BOTTOM - rate * (BOTTOM - TOP);
    let mut svg = Svg::new(RIGHT + 190.0, BOTTOM + 50.0);
    for tick in 0..=5 {
        let rate = f64::from(tick) / 5.0;
        svg.line((LEFT, y(rate)), (RIGHT, y(rate)), "stroke=\"#ddd\"");
        svg.text((LEFT - 6.0, y(rate) + 4.0), "end", "", &format!("{rate:.1}"));
    }
    let series: [Series<'_>; 2] =
        [("with the tables", &|point| point.rate, "8 0"), ("tokens on random ranks", &|point| point.random, "5 4")];
    for (which, (name, of, dash)) in series.into_iter().enumerate() {
        let colour = KINDS[which];
        for (at, point) in points.iter().enumerate() {
            if at > 0 {
                let style = format!("stroke=\"{colour}\" stroke-width=\"2\" stroke-dasharray=\"{dash}\"");
                svg.line((x(at - 1), y(of(&points[at - 1]))), (x(at), y(of(point))), &style);
            }
            svg.raw(&format!("<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\" fill=\"{colour}\"/>", x(at), y(of(point))));
            svg.text((x(at) + 6.0, y(of(point)) - 7.0), "start", "", &format!("{:.3}", of(point)));
            svg.text((x(at), BOTTOM + 18.0), "middle", "", &point.groups.to_string());
        }
        let row = TOP + 14.0 + which as f64 * 20.0;
        svg.line(
            (RIGHT + 14.0, row - 4.0),
            (RIGHT + 38.0, row - 4.0),
            &format!("stroke=\"{colour}\" stroke-width=\"2\" stroke-dasharray=\"{dash}\""),
        );
        svg.text((RIGHT + 44.0, row), "start", "", name);
    }
    svg.line((LEFT, TOP), (LEFT, BOTTOM), "stroke=\"#1a1a1a\"");
    svg.line((LEFT, BOTTOM), (RIGHT, BOTTOM), "stroke=\"#1a1a1a\"");
    svg.text(((LEFT + RIGHT) / 2.0, BOTTOM + 40.0), "middle", "", "groups (expert-parallel ranks)");
    svg.upright((16.0, (TOP + BOTTOM) / 2.0), "local activation rate");
    let judged = if points.iter().all(|point| point.held_out) {
        "judged on data that were not solved on"
    } else {
        "judged on the data that were solved on, which flatters: give a trace, or <code>--held-out</code>"
    };
    format!(
        "<p>Share of the activations on the token's own rank, each token on the rank that T thinks best ({judged}).</p>\n{}",
        svg.finish("Local activation rate against the number of groups")
    )
}
