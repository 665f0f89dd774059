//! Tables and verdicts. Pure.

use std::fmt::Write as _;

use semmoe_bench_e2e::error::BenchError;
use semmoe_bench_papers::mixserve::TwoLevels;

use crate::layouts::{Layout, NODES, best_size};
use crate::measure::Block;
use crate::stages::MedianExchange;

/// A layout at one ratio, over all rounds.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) layout: Layout,
    /// Inner over outer bandwidth; `None` if unlimited.
    pub(crate) ratio: Option<f64>,
    /// Tokens per second: median, minimum, maximum.
    pub(crate) throughput: [f64; 3],
    pub(crate) other_bytes: f64,
    pub(crate) node_bytes: f64,
    /// Over full layers.
    pub(crate) exchange: Option<MedianExchange>,
}

impl Row {
    /// Summarises the blocks of one layout and ratio, at least one.
    pub(crate) fn of(blocks: &[&Block], exchange: Option<MedianExchange>) -> Option<Self> {
        let first = blocks.first()?;
        let mut rates: Vec<f64> = blocks.iter().map(|block| block.throughput).collect();
        rates.sort_by(f64::total_cmp);
        let mean = |of: fn(&Block) -> f64| blocks.iter().map(|block| of(block)).sum::<f64>() / blocks.len() as f64;
        Some(Self {
            layout: first.layout,
            ratio: first.ratio,
            throughput: [rates[rates.len() / 2], rates[0], rates[rates.len() - 1]],
            other_bytes: mean(|block| block.other_bytes),
            node_bytes: mean(|block| block.node_bytes),
            exchange,
        })
    }

    /// Whether every run of this one was faster than the fastest of the other.
    fn beats(&self, other: &Self) -> bool {
        self.throughput[1] > other.throughput[2]
    }
}

/// The rows of one ratio.
#[derive(Clone, Debug)]
pub(crate) struct Links {
    /// Input of the planner; meaningless if the links inside are unlimited.
    pub(crate) unit: TwoLevels,
    pub(crate) rows: Vec<Row>,
}

impl Links {
    fn find(&self, layout: Layout) -> Option<&Row> {
        self.rows.iter().find(|row| row.layout == layout)
    }

    /// Time of the fused exchange over that of the unfused one.
    fn fused_share(&self, chunks: u16) -> Option<f64> {
        let fused = self.find(Layout::Fused { nodes: NODES, chunks })?.exchange?.times.seconds;
        let turns = self.find(Layout::Unfused(NODES))?.exchange?.times;
        Some(fused / (turns.inside + turns.between))
    }

    /// Counts the pairs whose throughputs differ by more than their spread, and lists those that the planner ranks the
    /// wrong way round.
    fn misranked(&self) -> Result<(usize, Vec<String>), BenchError> {
        let (mut pairs, mut wrong) = (0, Vec::new());
        for fast in &self.rows {
            for slow in self.rows.iter().filter(|slow| fast.beats(slow)) {
                pairs += 1;
                if fast.layout.predicted(&self.unit)? >= slow.layout.predicted(&self.unit)? {
                    wrong.push(format!("{} over {}", fast.layout.name(), slow.layout.name()));
                }
            }
        }
        Ok((pairs, wrong))
    }
}

/// The whole report as Markdown. `many`: bytes of a unit of more nodes.
pub(crate) fn markdown(limited: &[Links], host: &[Row], many: &[Row], chunks: u16) -> Result<String, BenchError> {
    let mut out = String::from(
        "| inner / outer bandwidth | layout | tokens/s (least to most) | bytes a token: other nodes, own node | exchange of a layer, ms | planned, ms | layers |\n\
         |---|---|---|---|---|---|---|\n",
    );
    for links in limited {
        for row in &links.rows {
            let planned = format!("{:.1}", row.layout.predicted(&links.unit)? * 1e3);
            line(row, &planned, &mut out);
        }
    }
    host.iter().for_each(|row| line(row, "", &mut out));
    out.push_str("\n| inner / outer bandwidth | inner, ms | outer, ms | fused over both in turns | planned | fused over ep, tokens/s | pairs apart, misranked | best of domains: measured, planned |\n|---|---|---|---|---|---|---|---|\n");
    for links in limited {
        verdicts(links, chunks, &mut out)?;
    }
    if !many.is_empty() {
        out.push_str("\n| more nodes | bytes a token: other nodes, own node |\n|---|---|\n");
    }
    for row in many {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "| {} | {:.0}, {:.0} |", row.layout.name(), row.other_bytes, row.node_bytes);
    }
    Ok(out)
}

fn line(row: &Row, planned: &str, out: &mut String) {
    let ratio = row.ratio.map_or_else(|| "one host".to_owned(), |ratio| ratio.to_string());
    let [middle, least, most] = row.throughput;
    let (exchange, layers) = row.exchange.map_or_else(Default::default, |median| {
        (format!("{:.1}", median.times.seconds * 1e3), median.layers.to_string())
    });
    let (name, other, node) = (row.layout.name(), row.other_bytes, row.node_bytes);
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "| {ratio} | {name} | {middle:.0} ({least:.0} to {most:.0}) | {other:.0}, {node:.0} | {exchange} | {planned} | {layers} |"
    );
}

fn verdicts(links: &Links, chunks: u16, out: &mut String) -> Result<(), BenchError> {
    let shown = |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.2}"));
    let turns = links.find(Layout::Unfused(NODES)).and_then(|row| row.exchange).unwrap_or_default().times;
    let rate = |layout| links.find(layout).map(|row| row.throughput[0]);
    let gain =
        rate(Layout::Fused { nodes: NODES, chunks }).zip(rate(Layout::Domains(1))).map(|(fused, flat)| fused / flat);
    let (pairs, wrong) = links.misranked()?;
    let wrong = if wrong.is_empty() { "none".to_owned() } else { wrong.join("; ") };
    let domains = |row: &&Row| matches!(row.layout, Layout::Domains(_));
    let best = links.rows.iter().filter(domains).max_by(|a, b| a.throughput[0].total_cmp(&b.throughput[0]));
    let all = links.unit.nodes * links.unit.width;
    let planned = best_size(&links.unit, all).map_err(BenchError::failed)?;
    let ratio = links.rows.first().and_then(|row| row.ratio).unwrap_or_default();
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "| {ratio} | {:.1} | {:.1} | {} | {:.2} | {} | {pairs}, {wrong} | {}, {planned} |",
        turns.inside * 1e3,
        turns.between * 1e3,
        shown(links.fused_share(chunks)),
        links.unit.fused(chunks.into()) / links.unit.unfused(),
        shown(gain),
        best.map_or_else(String::new, |row| match row.layout {
            Layout::Domains(size) => size.to_string(),
            _ => String::new(),
        }),
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stages::Exchange;

    fn row(layout: Layout, throughput: [f64; 3], seconds: f64) -> Row {
        let times = Exchange { seconds, between: seconds / 2.0, inside: seconds / 2.0 };
        let exchange = Some(MedianExchange { times, layers: 9 });
        Row { layout, ratio: Some(2.0), throughput, other_bytes: 1.0, node_bytes: 2.0, exchange }
    }

    #[test]
    fn layouts_that_are_apart_are_compared_with_the_plan() {
        let unit = TwoLevels {
            tokens: 256.0,
            row_bytes: 1024.0,
            experts: 32,
            top_k: 4,
            nodes: 2,
            width: 2,
            inside: 2e6,
            between: 1e6,
        };
        let rows = vec![
            row(Layout::Domains(1), [10.0, 9.0, 11.0], 0.3),
            row(Layout::Unfused(NODES), [10.5, 9.5, 12.0], 0.4),
            row(Layout::Fused { nodes: NODES, chunks: 4 }, [8.0, 7.0, 8.5], 0.3),
        ];
        let links = Links { unit, rows };
        // ep and unfused are indistinguishable; both beat fused, which the planner predicts to be faster than either.
        let (pairs, wrong) = links.misranked().unwrap();
        assert_eq!((pairs, wrong.len()), (2, 2), "{wrong:?}");
        assert!((links.fused_share(4).unwrap() - 0.75).abs() < 1e-12);
        let text = markdown(std::slice::from_ref(&links), &links.rows[..1], &links.rows[2..], 4).unwrap();
        assert!(text.contains("| 2 | hybrid:2x2:4 | 8 (7 to 8) |") || text.contains("8 (7 to 9)"), "{text}");
        assert!(text.ends_with("| hybrid:2x2:4 | 1, 2 |\n"), "{text}");
        assert!(text.contains("2, ep over hybrid:2x2:4; hybrid:2x2 over hybrid:2x2:4 | 1, 4 |"), "{text}");
    }
}
