//! `/metrics`: the counters of all ranks in the Prometheus text format.

use std::fmt::Write as _;
use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;

use super::app::App;
use crate::engine::RankStats;
use crate::ep::ByPlace;

/// `GET /metrics`. Counts are asked of every rank between two of its steps, so that they are exact when nothing runs; of a
/// dead unit the last known ones are told.
pub(super) async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    let stats = app.unit.stats().await;
    let up = app.unit.lost().is_none();
    let text = render(&app.model.moe_layers, &stats, &app.unit.in_flight(), up);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text)
}

/// `layers` holds the model's layer number of each MoE layer.
fn render(layers: &[u16], stats: &[RankStats], in_flight: &[usize], up: bool) -> String {
    let mut page = Page::default();
    page.family("semmoe_activations_total", "counter", "(token, expert) pairs by where the expert lies.");
    for (rank, stats) in stats.iter().enumerate() {
        for (layer, count) in layers.iter().zip(&stats.counters.activations) {
            for (place, value) in places(*count) {
                page.sample(&format!("rank=\"{rank}\",layer=\"{layer}\",where=\"{place}\""), value);
            }
        }
    }
    page.family("semmoe_dispatch_bytes_total", "counter", "Bytes of dispatch and combine by where they went.");
    for (rank, stats) in stats.iter().enumerate() {
        for (place, value) in places(stats.counters.bytes) {
            page.sample(&format!("rank=\"{rank}\",where=\"{place}\""), value);
        }
    }
    page.family("semmoe_tokens_total", "counter", "Tokens that went through the model.");
    for (rank, stats) in stats.iter().enumerate() {
        page.sample(&format!("rank=\"{rank}\",phase=\"prefill\""), stats.counters.prefill_tokens);
        page.sample(&format!("rank=\"{rank}\",phase=\"decode\""), stats.counters.decode_tokens);
    }
    page.family("semmoe_requests_in_flight", "gauge", "Sequences running or waiting.");
    for (rank, count) in in_flight.iter().enumerate() {
        page.sample(&format!("rank=\"{rank}\""), *count as u64);
    }
    page.family("semmoe_unit_up", "gauge", "1 while no rank is lost.");
    page.sample("", u64::from(up));
    page.text
}

fn places(count: ByPlace) -> [(&'static str, u64); 2] {
    [("local", count.local), ("remote", count.remote)]
}

#[derive(Default)]
struct Page {
    text: String,
    family: &'static str,
}

impl Page {
    fn family(&mut self, name: &'static str, kind: &str, help: &str) {
        self.family = name;
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// Labels are numbers and fixed words: nothing to escape.
    fn sample(&mut self, labels: &str, value: u64) {
        let _ = match labels {
            "" => writeln!(self.text, "{} {value}", self.family),
            labels => writeln!(self.text, "{}{{{labels}}} {value}", self.family),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ep::CountersSnapshot;

    #[test]
    fn the_page_holds_every_series() {
        let counters = CountersSnapshot {
            activations: vec![ByPlace { local: 1, remote: 2 }],
            bytes: ByPlace { local: 3, remote: 4 },
            prefill_tokens: 5,
            decode_tokens: 6,
        };
        let page = render(&[7], &[RankStats { counters, ..RankStats::default() }], &[8], true);
        for line in [
            "semmoe_activations_total{rank=\"0\",layer=\"7\",where=\"remote\"} 2",
            "semmoe_dispatch_bytes_total{rank=\"0\",where=\"local\"} 3",
            "semmoe_tokens_total{rank=\"0\",phase=\"decode\"} 6",
            "semmoe_requests_in_flight{rank=\"0\"} 8",
            "semmoe_unit_up 1",
        ] {
            assert!(page.lines().any(|found| found == line), "{line} in {page}");
        }
    }
}
