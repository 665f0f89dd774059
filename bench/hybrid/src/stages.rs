//! Time spans of the stages of each MoE layer on each rank (`semmoe worker --stages`), and the duration of exchanges.

use std::collections::BTreeMap;
use std::path::Path;

use semmoe_bench_e2e::error::BenchError;
use serde::Deserialize;

/// One MoE layer of one step on one rank.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct LayerStages {
    /// Index among the model's MoE layers.
    pub(crate) layer: u16,
    /// Tokens of the rank.
    pub(crate) tokens: usize,
    pub(crate) spans: Vec<Span>,
}

/// A stage, in nanoseconds of a clock that all ranks share.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Span {
    pub(crate) stage: String,
    pub(crate) piece: usize,
    pub(crate) began: u64,
    pub(crate) ended: u64,
}

/// Stages before the experts; the others follow them.
const THERE: [&str; 2] = ["dispatch", "gather"];
const BACK: [&str; 2] = ["reduce", "combine"];
/// Stages that cross nodes.
pub(crate) const BETWEEN: [&str; 2] = ["dispatch", "combine"];
/// The stage that is not an exchange.
pub(crate) const EXPERTS: &str = "experts";

/// One MoE layer of one step on all ranks.
pub(crate) type OnAllRanks<'a> = Vec<&'a LayerStages>;

/// Duration of a layer's exchange, without the time that ranks waited for the last one to begin.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Exchange {
    /// Dispatch and combine, seconds.
    pub(crate) seconds: f64,
    /// Of that, the time until the last row has crossed nodes in dispatch, and from the first sum crossing nodes in
    /// combine. If the levels alternate, the rest is the time inside nodes.
    pub(crate) between: f64,
    pub(crate) inside: f64,
}

/// The medians of several layers.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct MedianExchange {
    pub(crate) times: Exchange,
    pub(crate) layers: usize,
}

/// Reads the logs of all ranks, which must hold the same layers.
pub(crate) fn read(paths: &[impl AsRef<Path>]) -> Result<Vec<Vec<LayerStages>>, BenchError> {
    let logs: Vec<Vec<LayerStages>> = paths.iter().map(|path| read_one(path.as_ref())).collect::<Result<_, _>>()?;
    match logs.iter().map(Vec::len).min() == logs.iter().map(Vec::len).max() {
        true => Ok(logs),
        false => {
            let lengths: Vec<usize> = logs.iter().map(Vec::len).collect();
            Err(BenchError::failed(format!("ranks logged {lengths:?} layers, expected equal numbers")))
        }
    }
}

fn read_one(path: &Path) -> Result<Vec<LayerStages>, BenchError> {
    let text = std::fs::read_to_string(path).map_err(BenchError::file(path))?;
    let bad = |line: &str| BenchError::failed(format!("{} has a line that is not a layer: {line:?}", path.display()));
    text.lines().map(|line| serde_json::from_str(line).map_err(|_| bad(line))).collect()
}

/// Layers that all ranks began within a time span, with a minimum number of tokens on each.
pub(crate) fn within(logs: &[Vec<LayerStages>], time: std::ops::Range<u64>, tokens: usize) -> Vec<OnAllRanks<'_>> {
    let layers = logs.first().map_or(0, Vec::len);
    let all = (0..layers).map(|at| logs.iter().map(|log| &log[at]).collect::<OnAllRanks<'_>>());
    let chosen = |ranks: &OnAllRanks<'_>| {
        ranks
            .iter()
            .all(|rank| rank.tokens >= tokens && rank.spans.first().is_some_and(|span| time.contains(&span.began)))
    };
    all.filter(chosen).collect()
}

/// The times of one layer; `None` if a rank has no stages.
pub(crate) fn exchange(ranks: &[&LayerStages]) -> Option<Exchange> {
    let way = |stages: &[&str]| -> Option<[u64; 2]> {
        let of = |rank: &&LayerStages| {
            let spans = || rank.spans.iter().filter(|span| stages.contains(&span.stage.as_str()));
            Some([spans().map(|span| span.began).min()?, spans().map(|span| span.ended).max()?])
        };
        let ranks: Vec<[u64; 2]> = ranks.iter().map(of).collect::<Option<_>>()?;
        // From when the last rank has begun.
        Some([ranks.iter().map(|of| of[0]).max()?, ranks.iter().map(|of| of[1]).max()?])
    };
    let seconds = |[from, to]: [u64; 2]| to.saturating_sub(from) as f64 * 1e-9;
    let ([there, arrived], [back, home]) = (way(&THERE)?, way(&BACK)?);
    let crossed = way(&THERE[..1])?[1];
    let reduced = way(&BACK[..1]).map_or(back, |of| of[1]);
    Some(Exchange {
        seconds: seconds([there, arrived]) + seconds([back, home]),
        between: seconds([there, crossed]) + seconds([reduced, home]),
        inside: seconds([crossed, arrived]) + seconds([back, reduced]),
    })
}

/// The median of each part over layers, for `tokens` tokens of a rank.
pub(crate) fn median(layers: &[OnAllRanks<'_>], tokens: f64) -> Option<MedianExchange> {
    let mut parts: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for ranks in layers {
        let found = ranks.iter().map(|rank| rank.tokens as f64).sum::<f64>() / ranks.len() as f64;
        let times = exchange(ranks)?;
        for (name, seconds) in [("all", times.seconds), ("between", times.between), ("inside", times.inside)] {
            parts.entry(name).or_default().push(seconds * tokens / found);
        }
    }
    let mut middle = |name: &str| {
        let values = parts.get_mut(name)?;
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    };
    let times = Exchange { seconds: middle("all")?, between: middle("between")?, inside: middle("inside")? };
    Some(MedianExchange { times, layers: layers.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(tokens: usize, spans: &[(&str, u64, u64)]) -> LayerStages {
        let span = |&(stage, began, ended): &(&str, u64, u64)| Span { stage: stage.to_owned(), piece: 0, began, ended };
        LayerStages { layer: 0, tokens, spans: spans.iter().map(span).collect() }
    }

    #[test]
    fn waiting_for_the_last_rank_to_begin_is_left_out() {
        let s = 1_000_000_000;
        let early = rank(
            8,
            &[
                ("dispatch", 0, 5 * s),
                ("gather", 5 * s, 6 * s),
                ("experts", 6 * s, 7 * s),
                ("reduce", 7 * s, 11 * s),
                ("combine", 11 * s, 14 * s),
            ],
        );
        let late = rank(
            8,
            &[
                ("dispatch", 3 * s, 5 * s),
                ("gather", 5 * s, 6 * s),
                ("experts", 6 * s, 9 * s),
                ("reduce", 9 * s, 10 * s),
                ("combine", 11 * s, 13 * s),
            ],
        );
        let both = [&early, &late];
        let found = exchange(&both).unwrap();
        // Dispatch takes 3 to 6, until 5 between nodes; combine 9 to 14, from 11 on between nodes.
        assert_eq!(found, Exchange { seconds: 8.0, between: 5.0, inside: 3.0 });
        assert_eq!(median(&[both.to_vec()], 4.0).unwrap().times.seconds, 4.0);
        let flat = rank(8, &[("dispatch", 0, s), ("experts", s, 2 * s), ("combine", 2 * s, 4 * s)]);
        assert_eq!(exchange(&[&flat]).unwrap(), Exchange { seconds: 3.0, between: 3.0, inside: 0.0 });
        let logs = vec![vec![early.clone()], vec![late.clone()]];
        assert_eq!(within(&logs, 0..4 * s, 8).len(), 1);
        assert!(within(&logs, 0..s, 8).is_empty() && within(&logs, 0..4 * s, 9).is_empty());
    }
}
