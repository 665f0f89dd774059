//! Draws requests in two dimensions: the paper's figure 6 (a).

use std::fmt::Write;

use super::draw::{KINDS, Svg};
use super::text::escape;
use crate::show::RequestMap;

const SIDE: f64 = 520.0;
/// Number of topics with a distinct mark; all others share one.
const NAMED: usize = 18;

pub(super) fn picture(map: &RequestMap) -> String {
    let mut svg = Svg::new(SIDE + 240.0, SIDE + 20.0);
    let place = |axis: usize| {
        let values = || map.points.iter().map(|point| point[axis]);
        let (low, high) = (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max));
        let span = (high - low).max(f64::MIN_POSITIVE);
        move |point: &[f64; 2]| 14.0 + (point[axis] - low) / span * (SIDE - 28.0)
    };
    let (x, y) = (place(0), place(1));
    svg.raw(&format!("<path d=\"M1 1H{SIDE}V{SIDE}H1z\" fill=\"none\" stroke=\"#888\"/>"));
    for (point, topic) in map.points.iter().zip(&map.topic_of) {
        svg.raw(&mark(x(point), y(point), *topic));
    }
    let others = (map.topics.len() > NAMED).then_some("other topics");
    for (at, topic) in map.topics.iter().take(NAMED).map(String::as_str).chain(others).enumerate() {
        let row = 18.0 + at as f64 * 20.0;
        svg.raw(&mark(SIDE + 20.0, row - 4.0, at));
        let name: String = topic.chars().take(28).collect();
        svg.text(SIDE + 34.0, row, "start", "", &escape(&name));
    }
    format!(
        "<p>{} requests, placed by the experts that they activate in all layers: nearby requests activate the same experts (t-SNE; directions and \
         scales have no meaning).</p>\n{}",
        map.points.len(),
        svg.finish(&format!("Scatter plot of {} requests with {} topics", map.points.len(), map.topics.len()))
    )
}

/// Draws a request's mark; colour and shape together identify the topic.
fn mark(x: f64, y: f64, topic: usize) -> String {
    if topic >= NAMED {
        return format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2\" fill=\"#999\"/>");
    }
    let colour = KINDS[topic % KINDS.len()];
    let mut shape = String::new();
    let _ = match topic / KINDS.len() {
        0 => write!(shape, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{colour}\"/>"),
        1 => write!(
            shape,
            "<path d=\"M{:.1} {:.1}h7v7h-7z\" fill=\"none\" stroke-width=\"1.6\" stroke=\"{colour}\"/>",
            x - 3.5,
            y - 3.5
        ),
        _ => write!(shape, "<path d=\"M{:.1} {:.1}l4.5 8h-9z\" fill=\"{colour}\"/>", x, y - 4.5),
    };
    shape
}
