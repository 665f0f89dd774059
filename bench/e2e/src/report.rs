//! The results as Markdown.

use std::fmt::Write as _;

use crate::analysis::{BYTES_TOLERANCE, GAIN_SHARE, GainVerdict, Spread};
use crate::measure::Block;
use crate::results::{Outcome, Placed, Summary};

/// Markers around the tables on a page.
const BEGIN: &str = "<!-- results: begin -->\n";
const END: &str = "<!-- results: end -->\n";
/// How far below the promised local rate a measured one may be before the report says so.
const NEAR_PROMISE: f64 = 0.01;

/// The bars of all contests, then their tables.
pub(crate) fn describe(outcomes: &[Outcome], summaries: &[Summary]) -> String {
    let contests = || outcomes.iter().zip(summaries);
    let mut out = String::new();
    head(&["bar", "", "figure", ""], &mut out);
    contests().for_each(|(outcome, summary)| bars(outcome, summary, &mut out));
    for (outcome, summary) in contests() {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "\n### Attention {}\n", outcome.contest.attention);
        promise(outcome, &mut out);
        gains(summary, &mut out);
        saturation(outcome, &mut out);
        arrivals(outcome, &mut out);
        goodput(outcome, summary, &mut out);
    }
    out
}

/// Replaces the tables between the page's markers; `None` without markers.
pub(crate) fn in_page(page: &str, tables: &str) -> Option<String> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}{tables}{END}{after}"))
}

/// Median (minimum to maximum).
pub(crate) fn shown(spread: Option<Spread>, factor: f64, digits: usize) -> String {
    spread.map_or_else(
        || "-".to_owned(),
        |Spread { median, least, greatest }| {
            let [median, least, greatest] = [median, least, greatest].map(|value| value * factor);
            format!("{median:.digits$} ({least:.digits$} to {greatest:.digits$})")
        },
    )
}

/// The header rows of a table.
pub(crate) fn head(columns: &[&str], out: &mut String) {
    let _ = writeln!(out, "| {} |\n|{}", columns.join(" | "), " --- |".repeat(columns.len()));
}

/// A line of a table.
pub(crate) fn row(cells: &[String], out: &mut String) {
    let _ = writeln!(out, "| {} |", cells.join(" | "));
}

fn verdict(holds: bool) -> &'static str {
    if holds { "met" } else { "**MISSED**" }
}

/// One line for each bar.
fn bars(outcome: &Outcome, summary: &Summary, out: &mut String) {
    let attention = outcome.contest.attention;
    let [before, after] = outcome.predictions.map(|prediction| prediction.remote_ranks);
    if let Some(bytes) = summary.bytes {
        let _ = writeln!(
            out,
            "| remote dispatch bytes fall as predicted, within {:.0}% | {attention} | {:.1}% less; predicted {:.1}% (remote ranks \
             per token {before:.3} and {after:.3}): {:+.1}% off | {} |",
            BYTES_TOLERANCE * 100.0,
            bytes.measured * 100.0,
            bytes.predicted * 100.0,
            bytes.off * 100.0,
            verdict(bytes.holds)
        );
    }
    for link in &summary.links {
        let Some(gain) = &link.gain else { continue };
        let mean = [gain.by_collectives, gain.by_throughput].map(|kept| ("", kept));
        let fullest = gain.of_fullest_link.map(|kept| kept.map(|kept| (", bytes of the fullest link", kept)));
        let measures = ["collectives", "throughput"].into_iter().cycle();
        for (by, (bytes, kept)) in measures.zip(mean.into_iter().chain(fullest.into_iter().flatten())) {
            let _ = writeln!(
                out,
                "| gain in throughput at least {GAIN_SHARE} of Amdahl's, share of communication by {by}{bytes} | {attention}, {} | {:.3}: \
                 {:+.1}% of {:+.1}% | {} |",
                link.link.name,
                kept.kept,
                (gain.measured.median - 1.0) * 100.0,
                (kept.predicted.median - 1.0) * 100.0,
                verdict(kept.holds)
            );
        }
    }
}

/// The local rates that the tables promised, and those measured at saturation.
fn promise(outcome: &Outcome, out: &mut String) {
    for (side, config) in outcome.contest.configs().iter().enumerate() {
        let rates = (0..outcome.links.len()).flat_map(|link| outcome.saturated(side, link));
        let Some(found) = Spread::of(rates.map(|at| at.block.counters.lar())) else { continue };
        let promised = outcome.predictions[side].lar;
        let short = if found.median < promised - NEAR_PROMISE { ": **less than promised**" } else { "" };
        let _ = writeln!(
            out,
            "- {}: local activation rate {} over all links at saturation, `semmoe evaluate` promises {promised:.3}{short}",
            config.name,
            shown(Some(found), 1.0, 3)
        );
    }
    out.push('\n');
}

fn gains(summary: &Summary, out: &mut String) {
    if summary.links.iter().all(|link| link.gain.is_none()) {
        out.push_str("Links are not limited, so there is no communication to save.\n\n");
        return;
    }
    let columns =
        ["link", "bytes left", "gain", "share by collectives", "Amdahl's gain", "share by throughput", "Amdahl's gain"];
    head(&[&columns[..], &["gamma"]].concat(), out);
    for link in &summary.links {
        let of = |figure: &dyn Fn(&GainVerdict) -> Spread, digits| shown(link.gain.as_ref().map(figure), 1.0, digits);
        let cells = [
            link.link.name.clone(),
            of(&|gain| gain.bytes, 3),
            shown(link.measured, 1.0, 3),
            of(&|gain| gain.by_collectives.share, 2),
            of(&|gain| gain.by_collectives.predicted, 3),
            of(&|gain| gain.by_throughput.share, 2),
            of(&|gain| gain.by_throughput.predicted, 3),
            link.gamma.map_or_else(|| "-".to_owned(), |gamma| format!("{gamma:.2}")),
        ];
        row(&cells, out);
    }
    out.push('\n');
}

/// A column at saturation: name, figure, factor, digits.
type Column = (&'static str, fn(&Block) -> f64, f64, usize);

fn saturation(outcome: &Outcome, out: &mut String) {
    let columns: [Column; 12] = [
        ("tokens/s", |block| block.tokens_per_second, 1.0, 0),
        ("requests/s", |block| block.requests_per_second, 1.0, 1),
        ("local", |block| block.counters.lar(), 1.0, 4),
        ("dispatched bytes/token", |block| block.counters.dispatch_bytes(), 1.0, 0),
        ("all bytes/token", |block| block.counters.all_bytes(), 1.0, 0),
        ("time in steps", |block| block.counters.step_seconds / block.seconds, 1.0 / f64::from(outcome.ranks), 2),
        ("tokens of a step and rank", |block| block.counters.tokens / block.counters.steps, 1.0, 0),
        ("fullest rank", |block| block.counters.fullest(), 1.0, 2),
        ("fullest as wanted", |block| block.counters.fullest_wanted().unwrap_or(f64::NAN), 1.0, 2),
        ("step ms", |block| block.counters.step_seconds / block.counters.steps, 1e3, 2),
        ("MoE layer ms", |block| block.counters.moe_time(), 1e3, 3),
        ("CPU us/token", |block| block.counters.cpu_time(), 1e6, 0),
    ];
    out.push_str("At saturation:\n\n");
    head(&[&["link", ""][..], &columns.map(|(name, ..)| name)].concat(), out);
    for (link, at) in outcome.links.iter().enumerate() {
        for (side, config) in outcome.contest.configs().iter().enumerate() {
            let of =
                |(_, figure, factor, digits): Column| shown(outcome.at_saturation(side, link, figure), factor, digits);
            row(&[vec![at.name.clone(), config.name.to_owned()], columns.map(of).to_vec()].concat(), out);
        }
    }
    out.push('\n');
}

fn arrivals(outcome: &Outcome, out: &mut String) {
    if outcome.levels.is_empty() {
        return;
    }
    out.push_str(
        "As requests arrive in the trace, as a share of what the baseline keeps up with at the link (ms):\n\n",
    );
    let names = [
        "link",
        "load",
        "requests/s",
        "",
        "local",
        "first token p50",
        "p99",
        "end to end p50",
        "p99",
        "good requests/s",
    ];
    head(&names, out);
    for (link, at) in outcome.links.iter().enumerate().filter(|(link, _)| outcome.levels.contains_key(link)) {
        for load in outcome.loads() {
            for (side, config) in outcome.contest.configs().iter().enumerate() {
                let of = |figure: &dyn Fn(&Placed) -> Option<f64>, digits| {
                    shown(Spread::of(outcome.arrived(side, link, load).filter_map(figure)), 1.0, digits)
                };
                let offered = outcome.arrived(side, link, load).find_map(|at| at.block.offered).unwrap_or(0.0);
                let cells = [
                    at.name.clone(),
                    load.to_string(),
                    format!("{offered:.1}"),
                    config.name.to_owned(),
                    of(&|at| Some(at.block.counters.lar()), 3),
                    of(&|at| at.block.ttft_ms.map(|latency| latency.p50), 1),
                    of(&|at| at.block.ttft_ms.map(|latency| latency.p99), 1),
                    of(&|at| at.block.e2e_ms.map(|latency| latency.p50), 1),
                    of(&|at| at.block.e2e_ms.map(|latency| latency.p99), 1),
                    of(&|at| at.block.goodput, 1),
                ];
                row(&cells, out);
            }
        }
    }
    out.push('\n');
}

fn goodput(outcome: &Outcome, summary: &Summary, out: &mut String) {
    if outcome.levels.is_empty() {
        return;
    }
    let [before, after] = outcome.contest.configs();
    let _ = writeln!(
        out,
        "Goodput: the most requests per second, over all loads, that end within 5 times the lightest load's median.\n"
    );
    head(&["link", "within, ms", before.name, after.name], out);
    for (&link, level) in &outcome.levels {
        let [before, after] = summary.links[link].goodput.map(|spread| shown(spread, 1.0, 1));
        let _ = writeln!(out, "| {} | {:.0} | {before} | {after} |", summary.links[link].link.name, level.slo_ms);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_gets_new_tables_between_its_marks() {
        let page = format!("a\n{BEGIN}old\n{END}z\n");
        let new = in_page(&page, "new\n").unwrap();
        assert_eq!(new, format!("a\n{BEGIN}new\n{END}z\n"));
        assert_eq!(in_page(&new, "new\n").unwrap(), new);
        for page in ["a\n", BEGIN, END] {
            assert_eq!(in_page(page, "new\n"), None);
        }
    }
}
