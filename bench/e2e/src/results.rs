//! All measurements, and the conclusions from them.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use crate::analysis::{BytesVerdict, GainRound, GainVerdict, Line, Prediction, Spread};
use crate::analysis::{bytes_verdict, communication_share, gain_verdict, gamma};
use crate::configs::Contest;
use crate::counters::{Counters, ratio};
use crate::measure::Block;

/// A link rate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Link {
    /// Name in tables and pictures.
    pub(crate) name: String,
    /// Bits per second in each direction of each rank; `None` is unlimited.
    pub(crate) bits_per_second: Option<u64>,
    /// The communication share that it was chosen for.
    pub(crate) wanted: Option<f64>,
}

/// A block and its place: `side` 0 is before, 1 after; `link` indexes the contest's links.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Placed {
    pub(crate) side: usize,
    pub(crate) link: usize,
    pub(crate) round: usize,
    /// Share of the baseline's capacity; `None` at saturation.
    pub(crate) load: Option<f64>,
    #[serde(flatten)]
    pub(crate) block: Block,
}

/// Reference figures of a link's open loop.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Level {
    /// Requests per second that the baseline sustains.
    pub(crate) kept_up: f64,
    /// The longest latency of a good request.
    pub(crate) slo_ms: f64,
}

/// One contest.
#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    pub(crate) contest: Contest,
    pub(crate) ranks: u16,
    /// Link rates of the contest; the first one is unlimited.
    pub(crate) links: Vec<Link>,
    /// Predictions for both configurations.
    pub(crate) predictions: [Prediction; 2],
    /// By link, for links with open-loop runs.
    pub(crate) levels: BTreeMap<usize, Level>,
    pub(crate) blocks: Vec<Placed>,
}

/// The figures of one link.
#[derive(Debug, Serialize)]
pub(crate) struct LinkSummary {
    pub(crate) link: Link,
    /// Throughput after over before, of each round.
    pub(crate) measured: Option<Spread>,
    /// Only for limited links.
    pub(crate) gain: Option<GainVerdict>,
    /// A layer's time in dispatch and combine, per token, over its local activation rate.
    pub(crate) all_to_all: Option<Line>,
    /// The resulting gamma.
    pub(crate) gamma: Option<f64>,
    /// The highest goodput over all loads, for both configurations.
    pub(crate) goodput: [Option<Spread>; 2],
}

/// The figures of one contest.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    pub(crate) bytes: Option<BytesVerdict>,
    pub(crate) links: Vec<LinkSummary>,
}

impl Outcome {
    /// Blocks at saturation, in order of rounds.
    pub(crate) fn saturated(&self, side: usize, link: usize) -> impl Iterator<Item = &Placed> {
        self.blocks.iter().filter(move |at| at.side == side && at.link == link && at.load.is_none())
    }

    /// Blocks of an open loop at one load.
    pub(crate) fn arrived(&self, side: usize, link: usize, load: f64) -> impl Iterator<Item = &Placed> {
        self.blocks.iter().filter(move |at| at.side == side && at.link == link && at.load == Some(load))
    }

    /// Loads of the open loop, ascending.
    pub(crate) fn loads(&self) -> Vec<f64> {
        let mut loads: Vec<f64> = self.blocks.iter().filter_map(|at| at.load).collect();
        loads.sort_by(f64::total_cmp);
        loads.dedup();
        loads
    }

    /// A figure of all blocks at saturation.
    pub(crate) fn at_saturation(&self, side: usize, link: usize, of: impl Fn(&Block) -> f64) -> Option<Spread> {
        Spread::of(self.saturated(side, link).map(|at| of(&at.block)))
    }

    pub(crate) fn summary(&self) -> Summary {
        let bytes = |side| {
            let all = (0..self.links.len()).flat_map(|link| self.saturated(side, link));
            Spread::of(all.map(|at| at.block.counters.dispatch_bytes())).map(|spread| spread.median)
        };
        let ranks = self.predictions.map(|prediction| prediction.remote_ranks);
        Summary {
            bytes: bytes(0).zip(bytes(1)).map(|(before, after)| bytes_verdict([before, after], ranks)),
            links: (0..self.links.len()).map(|link| self.link_summary(link)).collect(),
        }
    }

    fn link_summary(&self, link: usize) -> LinkSummary {
        let rounds = self.rounds(link);
        let (all_to_all, gamma) = self.gamma(link).unzip();
        let limited = self.links[link].bits_per_second.is_some();
        LinkSummary {
            link: self.links[link].clone(),
            measured: Spread::of(rounds.iter().map(|round| round.throughput.1 / round.throughput.0)),
            gain: if limited { gain_verdict(&rounds, self.fullest_link()) } else { None },
            all_to_all,
            gamma,
            goodput: [0, 1].map(|side| self.goodput(side, link)),
        }
    }

    /// Rows over the fullest link, after over before, as predicted.
    fn fullest_link(&self) -> Option<f64> {
        let [before, after] = self.predictions.map(|prediction| prediction.fullest_link);
        Some(after? / before?)
    }

    /// The inputs of the verdict on the gain, of each round that has all its blocks.
    fn rounds(&self, link: usize) -> Vec<GainRound> {
        let of = |side, link, round| self.saturated(side, link).find(move |at| at.round == round);
        let last = self.blocks.iter().map(|at| at.round + 1).max().unwrap_or(0);
        let rounds = (0..last).filter_map(|round| {
            let free = &of(0, 0, round)?.block;
            let (before, after) = (&of(0, link, round)?.block, &of(1, link, round)?.block);
            Some(GainRound {
                throughput: (before.tokens_per_second, after.tokens_per_second),
                bytes: (before.counters.all_bytes(), after.counters.all_bytes()),
                share: share(&before.counters, &free.counters),
                share_by_throughput: 1.0 - ratio(before.tokens_per_second, free.tokens_per_second),
            })
        });
        rounds.collect()
    }

    /// Every layer of every block at saturation: its local activation rate and its time in dispatch and combine per
    /// token.
    pub(crate) fn layer_points(&self, link: usize) -> Vec<(f64, f64)> {
        let layers = |at: &Placed| {
            let tokens = at.block.counters.tokens;
            let point =
                move |layer: &crate::counters::LayerCounters| (layer.lar(), ratio(layer.all_to_all_seconds, tokens));
            at.block.counters.layers.values().map(point).collect::<Vec<_>>()
        };
        [0, 1].into_iter().flat_map(|side| self.saturated(side, link)).flat_map(layers).collect()
    }

    fn gamma(&self, link: usize) -> Option<(Line, f64)> {
        let line = Line::fit(&self.layer_points(link))?;
        let layers = self.saturated(0, link).next()?.block.counters.layers.len();
        let computing = |block: &Block| block.counters.step_time() - block.counters.collective_time();
        let computing = self.at_saturation(0, link, computing)?.median;
        Some((line, gamma(&line, layers, computing)))
    }

    /// The goodput at the load where it is highest.
    fn goodput(&self, side: usize, link: usize) -> Option<Spread> {
        let loads = self.loads();
        let spreads = loads
            .iter()
            .filter_map(|load| Spread::of(self.arrived(side, link, *load).filter_map(|at| at.block.goodput)));
        spreads.max_by(|a, b| a.median.total_cmp(&b.median))
    }
}

/// The share of a step spent on limited links, compared with equal work over unlimited ones.
pub(crate) fn share(limited: &Counters, free: &Counters) -> f64 {
    communication_share(limited.collective_time(), free.collective_time(), limited.step_time())
}

/// Rounds to six digits, more than any measurement here resolves.
pub(crate) fn shorten(value: &mut Value) {
    match value {
        Value::Number(number) if number.is_f64() => {
            let short = number.as_f64().and_then(|number| format!("{number:.5e}").parse::<f64>().ok());
            if let Some(short) = short.and_then(serde_json::Number::from_f64) {
                *number = short;
            }
        }
        Value::Array(values) => values.iter_mut().for_each(shorten),
        Value::Object(fields) => fields.values_mut().for_each(shorten),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::configs::DP;
    use crate::counters::LayerCounters;

    /// Counters of one layer of a block.
    struct Counted {
        lar: f64,
        bytes: f64,
        collective_seconds: f64,
        step_seconds: f64,
    }

    /// A block of 100 tokens in a second-long window, of one layer.
    fn block(side: usize, link: usize, counted: Counted) -> Placed {
        let Counted { lar, bytes, collective_seconds, step_seconds } = counted;
        let layer = LayerCounters {
            local: 100.0 * lar,
            remote: 100.0 * (1.0 - lar),
            bytes,
            moe_seconds: collective_seconds,
            all_to_all_seconds: collective_seconds,
            collective_seconds,
        };
        let counters = Counters {
            layers: BTreeMap::from([(0, layer)]),
            tokens: 100.0,
            steps: 10.0,
            step_seconds,
            ..Counters::default()
        };
        let block = Block {
            seconds: step_seconds,
            requests: 1,
            tokens_per_second: 100.0 / step_seconds,
            tokens_per_request: 100.0,
            offered: None,
            requests_per_second: 1.0 / step_seconds,
            ttft_ms: None,
            e2e_ms: None,
            goodput: None,
            counters,
        };
        Placed { side, link, round: 0, load: None, block }
    }

    fn outcome() -> Outcome {
        let link = |name: &str, bits_per_second| Link { name: name.to_owned(), bits_per_second, wanted: None };
        let prediction = |remote_ranks| Prediction { lar: 0.0, remote_ranks, fullest_link: None };
        // Computing takes 1.0, waiting 0.2; a limited link adds 0.8 for 1,000 bytes.
        Outcome {
            contest: DP,
            ranks: 2,
            links: vec![link("free", None), link("slow", Some(1000))],
            predictions: [prediction(2.0), prediction(1.5)],
            levels: BTreeMap::new(),
            blocks: vec![
                block(0, 0, Counted { lar: 0.25, bytes: 1000.0, collective_seconds: 0.2, step_seconds: 1.2 }),
                block(1, 0, Counted { lar: 0.5, bytes: 750.0, collective_seconds: 0.2, step_seconds: 1.2 }),
                block(0, 1, Counted { lar: 0.25, bytes: 1000.0, collective_seconds: 1.0, step_seconds: 2.0 }),
                block(1, 1, Counted { lar: 0.5, bytes: 750.0, collective_seconds: 0.8, step_seconds: 1.8 }),
            ],
        }
    }

    #[test]
    fn a_link_that_pays_as_amdahl_says_holds() {
        let summary = outcome().summary();
        let bytes = summary.bytes.unwrap();
        assert!(bytes.holds && (bytes.measured - 0.25).abs() < 1e-9 && bytes.off.abs() < 1e-9, "{bytes:?}");
        assert!(summary.links[0].gain.is_none());
        let slow = &summary.links[1];
        let gain = slow.gain.unwrap();
        for by in [gain.by_collectives, gain.by_throughput] {
            assert!((by.share.median - 0.4).abs() < 1e-9);
            assert!((by.kept - 1.0).abs() < 1e-9 && by.holds, "{gain:?}");
        }
        // Fully remote costs 0.4 more per 100 tokens for each half of the share; computing takes 1.0.
        assert!((slow.gamma.unwrap() - 0.8).abs() < 1e-9, "{slow:?}");
    }

    #[test]
    fn blocks_that_are_missing_leave_out_what_needs_them() {
        let mut outcome = outcome();
        outcome.blocks.remove(0);
        let summary = outcome.summary();
        assert!(summary.links[1].gain.is_none() && summary.links[1].measured.is_none());
        outcome.blocks.clear();
        let summary = outcome.summary();
        assert!(summary.bytes.is_none() && summary.links[1].gamma.is_none());
        assert!(outcome.loads().is_empty());
    }

    #[test]
    fn numbers_are_shortened_and_nothing_else() {
        let mut value = serde_json::json!({"a": [0.123_456_789, 12, "1.23456789"], "b": 1e300, "c": null});
        shorten(&mut value);
        assert_eq!(value, serde_json::json!({"a": [0.123_457, 12, "1.23456789"], "b": 1e300, "c": null}));
    }
}
