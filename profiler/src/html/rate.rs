//! Draws the local activation rate against the number of groups.

use super::draw::{KINDS, Svg};

/// Origin of a point's tables. Lines only connect points of the same kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateKind {
    /// Solved for the page, all from the same counts.
    Solved,
    /// A tables file given by the user, solved from unknown data.
    Given,
}

/// The local activation rate of tables.
#[derive(Clone, Debug)]
pub struct RatePoint {
    /// Number of groups, G.
    pub groups: u16,
    /// Local activation rate with the tables.
    pub rate: f64,
    /// Local activation rate with random routing.
    pub random: f64,
    /// Whether whole requests were routed, each to the rank that the affinity policy chooses; otherwise tokens, each to
    /// its best rank.
    pub by_requests: bool,
    /// Whether the rate was evaluated on held-out data; for given tables, as stated by the caller.
    pub held_out: bool,
    /// Origin of its tables.
    pub kind: RateKind,
}

const LEFT: f64 = 60.0;
const RIGHT: f64 = 560.0;
const TOP: f64 = 20.0;
const BOTTOM: f64 = 320.0;

/// Points of one kind, with a name and a style.
struct Series<'a> {
    name: String,
    colour: &'a str,
    /// Dash pattern of the connecting line; `None` draws no line.
    dashes: Option<&'a str>,
    points: Vec<(u16, f64)>,
}

/// Separates solved from given tables, and request rates from token rates, so that no line connects unlike figures.
fn series(points: &[RatePoint]) -> Vec<Series<'static>> {
    let mut all = Vec::new();
    let kinds =
        [(RateKind::Solved, "solved here", Some("8 0"), [0, 2]), (RateKind::Given, "given tables", None, [1, 5])];
    for (kind, name, dashes, colours) in kinds {
        for (unit, by_requests, colour) in [("requests", true, colours[0]), ("tokens", false, colours[1])] {
            let of = points.iter().filter(|point| point.kind == kind && point.by_requests == by_requests);
            let points: Vec<(u16, f64)> = of.map(|point| (point.groups, point.rate)).collect();
            if !points.is_empty() {
                all.push(Series { name: format!("{name}, by {unit}"), colour: KINDS[colour], dashes, points });
            }
        }
    }
    let mut random: Vec<(u16, f64)> = points.iter().map(|point| (point.groups, point.random)).collect();
    random.dedup_by_key(|point| point.0);
    all.push(Series { name: "random ranks".into(), colour: KINDS[4], dashes: Some("5 4"), points: random });
    all
}

pub(super) fn picture(points: &[RatePoint]) -> String {
    let mut points = points.to_vec();
    points.sort_by_key(|point| point.groups);
    let place = |groups: u16| f64::from(groups.max(1)).log2();
    let (low, high) = (place(points[0].groups), place(points[points.len() - 1].groups));
    let x = |groups: u16| {
        let share = if high > low { (place(groups) - low) / (high - low) } else { 0.5 };
        LEFT + 30.0 + share * (RIGHT - LEFT - 60.0)
    };
    let y = |rate: f64| BOTTOM - rate * (BOTTOM - TOP);
    let mut svg = Svg::new(RIGHT + 210.0, BOTTOM + 50.0);
    for tick in 0..=5 {
        let rate = f64::from(tick) / 5.0;
        svg.line(LEFT, y(rate), RIGHT, y(rate), "class=\"grid\"");
        svg.text(LEFT - 6.0, y(rate) + 4.0, "end", "", &format!("{rate:.1}"));
    }
    for (which, Series { name, colour, dashes, points }) in series(&points).iter().enumerate() {
        let row = TOP + 14.0 + which as f64 * 20.0;
        if let Some(dashes) = dashes {
            let style = format!("stroke=\"{colour}\" stroke-width=\"2\" stroke-dasharray=\"{dashes}\"");
            points.windows(2).for_each(|two| svg.line(x(two[0].0), y(two[0].1), x(two[1].0), y(two[1].1), &style));
            svg.line(RIGHT + 14.0, row - 4.0, RIGHT + 38.0, row - 4.0, &style);
        }
        svg.dot(RIGHT + 26.0, row - 4.0, colour, name);
        svg.text(RIGHT + 44.0, row, "start", "", name);
        for (groups, rate) in points {
            svg.dot(x(*groups), y(*rate), colour, &format!("{name}: {rate:.4} with {groups} groups"));
            svg.text(x(*groups) + 6.0, y(*rate) - 7.0, "start", "", &format!("{rate:.3}"));
            svg.text(x(*groups), BOTTOM + 18.0, "middle", "", &groups.to_string());
        }
    }
    svg.line(LEFT, TOP, LEFT, BOTTOM, "class=\"axis\"");
    svg.line(LEFT, BOTTOM, RIGHT, BOTTOM, "class=\"axis\"");
    svg.text((LEFT + RIGHT) / 2.0, BOTTOM + 40.0, "middle", "", "groups (expert-parallel ranks)");
    svg.upright(16.0, (TOP + BOTTOM) / 2.0, "local activation rate");
    let judged = if points.iter().all(|point| point.held_out) {
        "Evaluated on held-out data."
    } else {
        "Evaluated on the data used for the solve, which overstates the rate: pass a trace, or <code>--held-out</code>."
    };
    format!(
        "<p>Share of activations on the token's own rank. By requests: each request on the rank that the affinity policy chooses, with balanced \
         loads. By tokens: each token on its best rank according to T, a rate that requests cannot reach. {judged}</p>\n{}",
        svg.finish("Local activation rate against the number of groups")
    )
}
