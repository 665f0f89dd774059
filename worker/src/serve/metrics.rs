//! `/metrics`: all ranks' counters in the Prometheus text format.

use std::fmt::{Display, Write as _};
use std::sync::Arc;

use axum::extract::{RawQuery, State};
use axum::http::header;
use axum::response::IntoResponse;

use super::app::App;
use crate::engine::RankStats;
use crate::ep::{ByPlace, Collective, StepCount, StepPhase, TimedCollective, Traffic};
use crate::model::{DeviceWork, ExpertFetches, KvUsage};
use crate::unit::{LayoutName, SwitchHistory, SwitchKind};

/// `GET /metrics`. Every rank reports its counts between two of its steps, so they are exact when the unit is idle; a
/// failed unit reports its last known counts. `?name[]=A&name[]=B` selects metric families, because the page with all
/// layers is too long for clients that poll every few milliseconds.
pub(super) async fn metrics(State(app): State<Arc<App>>, RawQuery(query): RawQuery) -> impl IntoResponse {
    let stats = app.unit.stats().await;
    let up = app.unit.lost().is_none();
    let mut text = render(&app.served.config.moe_layers, &stats, &app.unit.in_flight(), up);
    text.push_str(&switches(app.unit.layout().epoch, &app.unit.switch_history()));
    if let Some(query) = query.filter(|query| query.starts_with("name")) {
        let names: Vec<_> = query.split('&').filter_map(|pair| pair.split_once('=')).map(|(_, name)| name).collect();
        text = only(&text, &names);
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text)
}

/// Keeps only the metric families with these names.
fn only(page: &str, names: &[&str]) -> String {
    let is_wanted = |line: &&str| {
        let line = line.trim_start_matches("# HELP ").trim_start_matches("# TYPE ");
        line.split(['{', ' ']).next().is_some_and(|name| names.contains(&name))
    };
    page.split_inclusive('\n').filter(is_wanted).collect()
}

/// Renders the page; `layers` contains the layer number of each MoE layer.
fn render(layers: &[u16], stats: &[RankStats], in_flight: &[usize], up: bool) -> String {
    let mut page = Page::default();
    let help = "(token, expert) pairs of the rank's tokens, by whether the expert is on this rank.";
    by_place(&mut page, "semmoe_activations_total", help, layers, stats, |traffic| traffic.activations);
    let help = "Dispatch and combine bytes for the rank's tokens, by whether they stayed on this rank.";
    by_place(&mut page, "semmoe_dispatch_bytes_total", help, layers, stats, |traffic| traffic.bytes);
    let help = "Dispatch and combine bytes for the rank's tokens, by distance: rank = not sent, node = within a node, other = between nodes.";
    page.counter("semmoe_level_bytes_total", help, stats, |stats| labelled("level", stats.counters.levels.named()));
    attention_tp(&mut page, stats);
    let help = "Tokens processed by the model; under attention tp, rank 0 counts them.";
    page.counter("semmoe_tokens_total", help, stats, |stats| {
        let counters = &stats.counters;
        labelled("phase", [("prefill", counters.prefill_tokens), ("decode", counters.decode_tokens)])
    });
    times(&mut page, layers, stats);
    fetches(&mut page, stats);
    devices(&mut page, stats);
    let help = "Prompt tokens found in the KV cache.";
    page.counter("semmoe_cached_prompt_tokens_total", help, stats, |stats| [("", stats.cached_tokens)]);
    page.family(
        "semmoe_kv_pages",
        "gauge",
        "KV cache pages by state: used (held by sequences), cached (kept for reuse) or free.",
    );
    page.by_rank(stats, |stats| {
        let KvUsage { used, cached, capacity, .. } = stats.kv;
        labelled("state", [("used", used), ("cached", cached), ("free", capacity.saturating_sub(used + cached))])
    });
    let help = "Cached pages that were evicted.";
    page.counter("semmoe_kv_evicted_pages_total", help, stats, |stats| [("", stats.kv.evicted)]);
    page.family("semmoe_requests_in_flight", "gauge", "Sequences running or waiting.");
    for (rank, count) in in_flight.iter().enumerate() {
        page.sample(&format!("rank=\"{rank}\""), *count as u64);
    }
    page.family("semmoe_unit_up", "gauge", "1 while no rank is lost.");
    page.sample("", u64::from(up));
    page.text
}

/// Adds a counter by layer, phase and locality.
fn by_place(
    page: &mut Page,
    name: &'static str,
    help: &str,
    layers: &[u16],
    stats: &[RankStats],
    of: fn(&Traffic) -> ByPlace,
) {
    page.counter(name, help, stats, |stats| {
        layers.iter().zip(&stats.counters.layers).flat_map(move |(layer, traffic)| {
            StepPhase::ALL.into_iter().flat_map(move |phase| {
                let labels = format!(",layer=\"{layer}\",phase=\"{}\",where=", phase.name());
                let ByPlace { local, remote } = of(traffic.of(phase));
                [("local", local), ("remote", remote)].map(|(place, value)| (format!("{labels}\"{place}\""), value))
            })
        })
    });
}

/// Renders the metrics of layout switches.
fn switches(epoch: u64, history: &SwitchHistory) -> String {
    let mut page = Page::default();
    page.family("semmoe_layout_epoch", "gauge", "Layout and placement switches since startup.");
    page.sample("", epoch);
    page.family("semmoe_switch_total", "counter", "Switches by source, target and outcome.");
    for (SwitchKind { from, to, end }, count) in &history.counts {
        page.sample(&format!("from=\"{from}\",to=\"{to}\",outcome=\"{}\"", end.name()), count);
    }
    if let Some(last) = history.last {
        page.family("semmoe_switch_last_seconds", "gauge", "How long the last switch held requests.");
        page.sample("", last.as_secs_f64());
    }
    page.text
}

/// Adds the attention tp metrics, which are zero under attention dp.
fn attention_tp(page: &mut Page, stats: &[RankStats]) {
    let help = "Bytes sent by the rank for attention tp: srs = partial sums of the attention output, sag = rows \
                and their experts returned to all ranks, sync = commands and sampled tokens before each step.";
    page.counter("semmoe_attention_bytes_total", help, stats, |stats| {
        let names = Collective::ALL.into_iter().map(Collective::name);
        labelled("collective", names.zip(stats.counters.collective_bytes))
    });
    let help = "Rows (one per token and MoE layer) processed by the rank: assigned by the tables, moved from a full rank, \
                or split evenly without tables.";
    page.counter("semmoe_attention_rows_total", help, stats, |stats| {
        let rows = &stats.counters.rows;
        labelled("by", [("tables", rows.by_tables), ("moved", rows.moved), ("even", rows.evenly)])
    });
    let help = "Rows on the fullest rank, summed over MoE layers and steps; the same on all ranks. taken = after moves, \
                wanted = without moves. Summed over ranks and divided by the sum of semmoe_attention_rows_total: fullest over mean.";
    page.counter("semmoe_attention_fullest_rows_total", help, stats, |stats| {
        let rows = &stats.counters.rows;
        labelled("split", [("taken", rows.fullest), ("wanted", rows.fullest_wanted)])
    });
}

/// Adds the cost of expert streaming, if any rank streams experts.
fn fetches(page: &mut Page, stats: &[RankStats]) {
    if stats.iter().all(|stats| stats.fetches.is_none()) {
        return;
    }
    let mut family = |name, kind, help, of: fn(&ExpertFetches) -> f64| {
        page.family(name, kind, help);
        page.by_rank(stats, |stats| stats.fetches.as_ref().map(|fetches| ("", of(fetches))));
    };
    let help = "Expert memory on a rank that streams its experts.";
    family("semmoe_expert_memory_bytes", "gauge", help, |of| of.memory_bytes as f64);
    let help = "Expert bytes read from the checkpoint during steps.";
    family("semmoe_expert_fetch_bytes_total", "counter", help, |of| of.bytes as f64);
    let help = "Time spent reading and packing streamed experts.";
    family("semmoe_expert_fetch_seconds_total", "counter", help, |of| of.fetching.as_secs_f64());
    let help = "Time that steps waited for streamed experts.";
    family("semmoe_expert_wait_seconds_total", "counter", help, |of| of.waited.as_secs_f64());
    let help = "Fraction of the read time since startup that no step waited for.";
    family("semmoe_expert_fetch_hidden_ratio", "gauge", help, ExpertFetches::hidden);
}

/// Adds GPU metrics, if any rank has a GPU.
fn devices(page: &mut Page, stats: &[RankStats]) {
    if stats.iter().all(|stats| stats.device.is_none()) {
        return;
    }
    let mut family = |name, help, of: fn(&DeviceWork) -> f64| {
        page.family(name, "counter", help);
        page.by_rank(stats, |stats| stats.device.as_ref().map(|work| ("", of(work))));
    };
    family("semmoe_gpu_launches_total", "Kernel launches, excluding collectives.", |of| of.launches as f64);
    let help = "Reads that blocked the host until the GPU was done.";
    family("semmoe_gpu_synchronisations_total", help, |of| of.synchronisations as f64);
    family("semmoe_gpu_wait_seconds_total", "Time that the host waited for the GPU.", |of| of.waited.as_secs_f64());
    let help = "Bytes copied from host to GPU, excluding collectives.";
    family("semmoe_gpu_written_bytes_total", help, |of| of.written as f64);
    family("semmoe_gpu_read_bytes_total", "Bytes copied from GPU to host.", |of| of.read as f64);
    let help = "Logit rows read by the host: for logprobs, and for tokens that the GPU's candidates did not determine.";
    family("semmoe_gpu_logit_rows_total", help, |of| of.logit_rows as f64);
}

/// Adds the breakdown of step time.
fn times(page: &mut Page, layers: &[u16], stats: &[RankStats]) {
    let help = "Steps of the whole model, including empty ones.";
    page.counter("semmoe_steps_total", help, stats, |stats| [("", stats.timings.steps)]);
    let seconds = |stats: &RankStats| [("", stats.timings.step.as_secs_f64())];
    page.counter("semmoe_step_seconds_total", "Time of the steps.", stats, seconds);
    steps_by_batch(page, stats);
    let help = "Time from the router's choice to the combined output.";
    page.counter("semmoe_moe_seconds_total", help, stats, |stats| {
        labelled("layer", layers.iter().zip(stats.timings.layers.iter().map(|timings| timings.moe.as_secs_f64())))
    });
    let help = "Time in collectives, including the wait for slower ranks.";
    page.counter("semmoe_collective_seconds_total", help, stats, |stats| {
        layers.iter().zip(&stats.timings.layers).flat_map(|(layer, timings)| {
            TimedCollective::ALL.into_iter().map(move |kind| {
                let labels = format!(",layer=\"{layer}\",kind=\"{}\"", kind.name());
                (labels, timings.of(kind).as_secs_f64())
            })
        })
    });
}

/// Adds a label to each value.
fn labelled<W: Display, V>(name: &str, values: impl IntoIterator<Item = (W, V)>) -> impl Iterator<Item = (String, V)> {
    values.into_iter().map(move |(word, value)| (format!(",{name}=\"{word}\""), value))
}

/// Adds step counts and times by layout, phase and batch.
fn steps_by_batch(page: &mut Page, stats: &[RankStats]) {
    let help = "Steps by layout, phase and batch size on this rank: prompt tokens for prefill steps, sequences for \
                decode steps. The batch label is the upper end of a half-octave bucket.";
    let mut family = |name, help, value: fn(&StepCount) -> f64| {
        page.counter(name, help, stats, |stats| {
            let mut counts = stats.timings.by_batch.clone();
            counts.sort_by_key(|count| (layout_of(count), count.phase, count.batch));
            counts.into_iter().map(move |count| {
                let (layout, phase, batch) = (layout_of(&count), count.phase.name(), count.batch);
                (format!(",layout=\"{layout}\",phase=\"{phase}\",batch=\"{batch}\""), value(&count))
            })
        });
    };
    family("semmoe_layout_steps_total", help, |count| count.steps as f64);
    family("semmoe_layout_step_seconds_total", "Step time by layout, phase and batch.", |count| {
        count.time.as_secs_f64()
    });
}

fn layout_of(count: &StepCount) -> LayoutName {
    LayoutName::of(count.attention, count.experts)
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

    /// Adds a counter with samples for every rank; see [`Page::by_rank`].
    fn counter<'a, L: Display, V: Display, I: IntoIterator<Item = (L, V)>>(
        &mut self,
        name: &'static str,
        help: &str,
        stats: &'a [RankStats],
        of: impl Fn(&'a RankStats) -> I,
    ) {
        self.family(name, "counter", help);
        self.by_rank(stats, of);
    }

    /// Adds samples for every rank; `of` returns each value with the labels that follow the rank label.
    fn by_rank<'a, L: Display, V: Display, I: IntoIterator<Item = (L, V)>>(
        &mut self,
        stats: &'a [RankStats],
        of: impl Fn(&'a RankStats) -> I,
    ) {
        for (rank, stats) in stats.iter().enumerate() {
            for (labels, value) in of(stats) {
                self.sample(&format!("rank=\"{rank}\"{labels}"), value);
            }
        }
    }

    /// Adds a sample. Labels are numbers and fixed words, so nothing needs escaping.
    fn sample(&mut self, labels: &str, value: impl Display) {
        let _ = match labels {
            "" => writeln!(self.text, "{} {value}", self.family),
            labels => writeln!(self.text, "{}{{{labels}}} {value}", self.family),
        };
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use semmoe_tables::LayerIdx;

    use super::*;
    use crate::ep::{Counters, LevelBytes, RowCounts};

    #[test]
    fn the_page_holds_every_series() {
        let mut counters = Counters::new(1);
        counters.add_tokens(StepPhase::Prefill, 5);
        counters.add_tokens(StepPhase::Decode, 6);
        let traffic = |json: &str| serde_json::from_str(json).unwrap();
        counters.add(
            LayerIdx::new(0),
            &traffic(
                r#"{"phases": [
                    {"activations": {"local": 1, "remote": 2}, "bytes": {"local": 3, "remote": 4}},
                    {"activations": {"local": 5, "remote": 6}, "bytes": {"local": 7, "remote": 8}}
                ]}"#,
            ),
            LevelBytes { rank: 20, node: 21, other: 22 },
        );
        counters.add_rows(RowCounts { by_tables: 11, moved: 10, evenly: 12, fullest: 13, fullest_wanted: 14 });
        let stats = RankStats {
            counters,
            timings: serde_json::from_str(
                r#"{"layers": [{
                    "moe": {"secs": 1, "nanos": 500000000},
                    "collectives": [
                        {"secs": 0, "nanos": 250000000}, {"secs": 2, "nanos": 0}, {"secs": 3, "nanos": 0}, {"secs": 4, "nanos": 0}
                    ]
                }], "steps": 9, "step": {"secs": 5, "nanos": 125000000}, "by_batch": [
                    {"attention": "dp", "experts": "Tp", "phase": "decode", "batch": 11, "steps": 4,
                     "time": {"secs": 0, "nanos": 500000000}},
                    {"attention": "dp", "experts": "Ep", "phase": "prefill", "batch": 512, "steps": 5,
                     "time": {"secs": 4, "nanos": 0}}
                ]}"#,
            )
            .unwrap(),
            kv: KvUsage { used: 2, cached: 3, capacity: 9, ..KvUsage::default() },
            cached_tokens: 64,
            ..RankStats::default()
        };
        let page = render(&[7], &[stats], &[8], true);
        assert!(!page.contains("semmoe_expert_"), "this rank streams no experts: {page}");
        has(
            &page,
            &[
                "semmoe_activations_total{rank=\"0\",layer=\"7\",phase=\"prefill\",where=\"remote\"} 2",
                "semmoe_activations_total{rank=\"0\",layer=\"7\",phase=\"decode\",where=\"local\"} 5",
                "semmoe_dispatch_bytes_total{rank=\"0\",layer=\"7\",phase=\"prefill\",where=\"local\"} 3",
                "semmoe_dispatch_bytes_total{rank=\"0\",layer=\"7\",phase=\"decode\",where=\"remote\"} 8",
                "semmoe_level_bytes_total{rank=\"0\",level=\"rank\"} 20",
                "semmoe_level_bytes_total{rank=\"0\",level=\"other\"} 22",
                "semmoe_attention_bytes_total{rank=\"0\",collective=\"sag\"} 0",
                "semmoe_attention_rows_total{rank=\"0\",by=\"even\"} 12",
                "semmoe_attention_rows_total{rank=\"0\",by=\"moved\"} 10",
                "semmoe_attention_fullest_rows_total{rank=\"0\",split=\"taken\"} 13",
                "semmoe_attention_fullest_rows_total{rank=\"0\",split=\"wanted\"} 14",
                "semmoe_tokens_total{rank=\"0\",phase=\"decode\"} 6",
                "semmoe_steps_total{rank=\"0\"} 9",
                "semmoe_step_seconds_total{rank=\"0\"} 5.125",
                "semmoe_layout_steps_total{rank=\"0\",layout=\"dp-tp\",phase=\"decode\",batch=\"11\"} 4",
                "semmoe_layout_step_seconds_total{rank=\"0\",layout=\"ep\",phase=\"prefill\",batch=\"512\"} 4",
                "semmoe_moe_seconds_total{rank=\"0\",layer=\"7\"} 1.5",
                "semmoe_collective_seconds_total{rank=\"0\",layer=\"7\",kind=\"dispatch\"} 0.25",
                "semmoe_collective_seconds_total{rank=\"0\",layer=\"7\",kind=\"gather\"} 4",
                "semmoe_cached_prompt_tokens_total{rank=\"0\"} 64",
                "semmoe_kv_pages{rank=\"0\",state=\"used\"} 2",
                "semmoe_kv_pages{rank=\"0\",state=\"free\"} 4",
                "semmoe_requests_in_flight{rank=\"0\"} 8",
                "semmoe_unit_up 1",
            ],
        );
    }

    #[test]
    fn a_rank_that_streams_experts_reports_its_fetches() {
        let (fetching, waited) = (Duration::from_secs(8), Duration::from_secs(2));
        let fetches = ExpertFetches { memory_bytes: 70, bytes: 71, fetching, waited };
        let stats = RankStats { fetches: Some(fetches), ..RankStats::default() };
        has(
            &render(&[], &[stats], &[0], true),
            &[
                "semmoe_expert_memory_bytes{rank=\"0\"} 70",
                "semmoe_expert_fetch_bytes_total{rank=\"0\"} 71",
                "semmoe_expert_fetch_seconds_total{rank=\"0\"} 8",
                "semmoe_expert_wait_seconds_total{rank=\"0\"} 2",
                "semmoe_expert_fetch_hidden_ratio{rank=\"0\"} 0.75",
            ],
        );
    }

    fn has(page: &str, lines: &[&str]) {
        for line in lines {
            assert!(page.lines().any(|found| found == *line), "{line} in {page}");
        }
    }
}
