//! Rows of the table: means over seeds, against the better static layout in each figure.

use semmoe_planner::policy::ByLayout;
use serde::Serialize;

use crate::contest::{Figures, Results};

/// A policy against the better static layout, chosen for each figure separately.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Margin {
    /// Percent more goodput; negative if lower.
    pub(crate) goodput_percent: f64,
    /// Percent less mean TPOT; negative if higher.
    pub(crate) tpot_percent: f64,
    pub(crate) switches: f64,
}

/// Absolute figures.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Absolute {
    pub(crate) goodput: f64,
    pub(crate) tpot_ms: f64,
    pub(crate) ttft_p99_seconds: f64,
    pub(crate) urgent_ttft_p99_seconds: f64,
    pub(crate) tokens_per_second: f64,
    pub(crate) stopped_seconds: f64,
}

/// One row.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Line {
    pub(crate) trace: &'static str,
    pub(crate) engine: String,
    /// Thousand prompt tokens per second, TP/EP.
    pub(crate) prefill: String,
    pub(crate) seeds: usize,
    /// One layout is faster at every batch, and its prefill is no slower.
    pub(crate) one_sided: bool,
    /// Percent of the requests that arrive in phases in which a static layout is better by 2%.
    pub(crate) prefers_tp_percent: f64,
    pub(crate) prefers_ep_percent: f64,
    pub(crate) static_tp: Absolute,
    pub(crate) static_ep: Absolute,
    pub(crate) ours: Absolute,
    pub(crate) moebius_absolute: Absolute,
    pub(crate) moebius: Margin,
    pub(crate) adaptive: Margin,
    /// The worst seed for each figure, and the most switches.
    pub(crate) adaptive_worst: Margin,
    pub(crate) oracle: Option<Margin>,
    /// See [`Results`].
    pub(crate) urgent_floor_seconds: f64,
}

/// `policy` against the better of `fixed`.
pub(crate) fn margin(policy: &Figures, fixed: &ByLayout<Figures>) -> Margin {
    let goodput = fixed.tp.goodput.max(fixed.ep.goodput);
    let tpot = fixed.tp.tpot_seconds.min(fixed.ep.tpot_seconds);
    Margin {
        goodput_percent: 100.0 * (policy.goodput / goodput - 1.0),
        tpot_percent: 100.0 * (1.0 - policy.tpot_seconds / tpot),
        switches: policy.switches,
    }
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    sum / f64::max(count, 1.0)
}

fn mean_figures(all: &[Results], of: impl Fn(&Results) -> Figures) -> Figures {
    Figures {
        goodput: mean(all.iter().map(|results| of(results).goodput)),
        tpot_seconds: mean(all.iter().map(|results| of(results).tpot_seconds)),
        ttft_seconds: mean(all.iter().map(|results| of(results).ttft_seconds)),
        urgent_ttft_seconds: mean(all.iter().map(|results| of(results).urgent_ttft_seconds)),
        tokens_per_second: mean(all.iter().map(|results| of(results).tokens_per_second)),
        switches: mean(all.iter().map(|results| of(results).switches)),
        stopped_seconds: mean(all.iter().map(|results| of(results).stopped_seconds)),
    }
}

/// The columns that identify a row.
pub(crate) struct Label {
    pub(crate) one_sided: bool,
    pub(crate) trace: &'static str,
    pub(crate) engine: String,
    pub(crate) prefill: String,
}

impl Line {
    /// The row of one contest over several seeds. The oracle's margin is of the first seed, on which it was searched.
    pub(crate) fn new(label: Label, all: &[Results]) -> Self {
        let absolute = |figures: Figures| Absolute {
            goodput: figures.goodput,
            tpot_ms: figures.tpot_seconds * 1e3,
            ttft_p99_seconds: figures.ttft_seconds,
            urgent_ttft_p99_seconds: figures.urgent_ttft_seconds,
            tokens_per_second: figures.tokens_per_second,
            stopped_seconds: figures.stopped_seconds,
        };
        let fixed = ByLayout { tp: mean_figures(all, |all| all.fixed.tp), ep: mean_figures(all, |all| all.fixed.ep) };
        let ours = mean_figures(all, |all| all.adaptive);
        let moebius = mean_figures(all, |all| all.moebius);
        let single: Vec<Margin> = all.iter().map(|results| margin(&results.adaptive, &results.fixed)).collect();
        let least = |of: fn(&Margin) -> f64| single.iter().map(of).fold(f64::INFINITY, f64::min);
        Line {
            trace: label.trace,
            engine: label.engine,
            prefill: label.prefill,
            seeds: all.len(),
            one_sided: label.one_sided,
            prefers_tp_percent: 100.0 * mean(all.iter().map(|results| results.prefers.tp)),
            prefers_ep_percent: 100.0 * mean(all.iter().map(|results| results.prefers.ep)),
            static_tp: absolute(fixed.tp),
            static_ep: absolute(fixed.ep),
            ours: absolute(ours),
            moebius_absolute: absolute(moebius),
            moebius: margin(&moebius, &fixed),
            adaptive: margin(&ours, &fixed),
            adaptive_worst: Margin {
                goodput_percent: least(|margin| margin.goodput_percent),
                tpot_percent: least(|margin| margin.tpot_percent),
                switches: single.iter().map(|margin| margin.switches).fold(0.0, f64::max),
            },
            urgent_floor_seconds: mean(all.iter().map(|results| results.urgent_floor_seconds)),
            oracle: all[0].oracle.map(|oracle| margin(&oracle, &all[0].fixed)),
        }
    }

    /// Whether each layout is the better one for at least 5% of the requests.
    pub(crate) fn crosses(&self) -> bool {
        self.prefers_tp_percent >= 5.0 && self.prefers_ep_percent >= 5.0
    }

    /// The bars that the row misses.
    pub(crate) fn missed(&self) -> Vec<&'static str> {
        let Margin { goodput_percent, tpot_percent, switches } = self.adaptive;
        let needed = if self.prefill == "28/28" || self.prefill == "45/45" { 1.0 } else { 2.0 };
        let bars = [
            (goodput_percent >= -0.5, "goodput below a static"),
            (tpot_percent >= -0.5, "TPOT above a static"),
            (!self.crosses() || goodput_percent.max(tpot_percent) >= needed, "gain too small"),
            (!self.one_sided || switches == 0.0, "switches for nothing"),
            (self.trace != "oscillating" || self.adaptive_worst.switches <= 3.0, "too many switches"),
        ];
        bars.into_iter().filter(|bar| !bar.0).map(|bar| bar.1).collect()
    }

    fn cells(&self) -> Vec<String> {
        let margin = |margin: &Margin| {
            format!("{:+.1} / {:+.1}, {:.1}", margin.goodput_percent, margin.tpot_percent, margin.switches)
        };
        let absolute = |absolute: &Absolute| format!("{:.2} / {:.1}", absolute.goodput, absolute.tpot_ms);
        let worst = &self.adaptive_worst;
        vec![
            self.trace.to_owned(),
            self.engine.clone(),
            self.prefill.clone(),
            format!("{:.0} / {:.0}", self.prefers_tp_percent, self.prefers_ep_percent),
            absolute(&self.static_tp),
            absolute(&self.static_ep),
            margin(&self.moebius),
            margin(&self.adaptive),
            format!("{:+.1} / {:+.1}, {:.0}", worst.goodput_percent, worst.tpot_percent, worst.switches),
            self.oracle.as_ref().map_or("-".to_owned(), margin),
            self.missed().join("; "),
        ]
    }
}

const COLUMNS: [&str; 11] = [
    "trace",
    "engine",
    "prefill TP/EP",
    "phases for TP / EP",
    "static TP",
    "static EP",
    "Moebius",
    "ours",
    "ours, worst seed",
    "oracle",
    "bar missed",
];

/// Most that urgent requests may wait for their first token with the policy, as a share of static EP's p99.
const URGENT_TTFT: f64 = 0.6;
/// Most by which the policy's total throughput may differ from static EP's.
const SAME_THROUGHPUT: f64 = 0.05;

impl Line {
    /// The policy's p99 TTFT of urgent requests, and its total throughput, over static EP's.
    fn urgent(&self) -> [f64; 2] {
        let Self { static_ep, ours, .. } = self;
        [
            ours.urgent_ttft_p99_seconds / static_ep.urgent_ttft_p99_seconds,
            ours.tokens_per_second / static_ep.tokens_per_second,
        ]
    }

    fn class_cells(&self) -> Vec<String> {
        let absolute = |absolute: &Absolute| {
            let Absolute { urgent_ttft_p99_seconds, ttft_p99_seconds, .. } = absolute;
            format!("{urgent_ttft_p99_seconds:.2} / {ttft_p99_seconds:.2}")
        };
        let [ttft, throughput] = self.urgent();
        let met = ttft <= URGENT_TTFT && (throughput - 1.0).abs() <= SAME_THROUGHPUT;
        vec![
            self.trace.to_owned(),
            self.engine.clone(),
            self.prefill.clone(),
            absolute(&self.static_tp),
            absolute(&self.static_ep),
            absolute(&self.ours),
            format!("{:.1}", self.adaptive.switches),
            format!("{ttft:.2}"),
            format!("{:.2}", self.urgent_floor_seconds / self.static_ep.urgent_ttft_p99_seconds),
            format!("{:+.1}%", 100.0 * (throughput - 1.0)),
            if met { "met" } else { "missed" }.to_owned(),
        ]
    }
}

const CLASS_COLUMNS: [&str; 11] = [
    "trace",
    "engine",
    "prefill TP/EP",
    "static TP, s",
    "static EP, s",
    "ours, s",
    "switches",
    "ours / EP",
    "better layout / EP",
    "throughput",
    "bar",
];

/// The table of two classes in Markdown: p99 TTFT of urgent requests and of all.
pub(crate) fn classes(lines: &[Line]) -> String {
    let rows: Vec<Vec<String>> = lines.iter().map(Line::class_cells).collect();
    table(&CLASS_COLUMNS, &rows)
}

fn table(columns: &[&str], rows: &[Vec<String>]) -> String {
    let row = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let mut text = format!("| {} |\n|{}\n", columns.join(" | "), "---|".repeat(columns.len()));
    rows.iter().for_each(|cells| text += &row(cells));
    text
}

/// The table in Markdown.
pub(crate) fn markdown(lines: &[Line]) -> String {
    let rows: Vec<Vec<String>> = lines.iter().map(Line::cells).collect();
    table(&COLUMNS, &rows)
}
