//! Published throughputs against the planner's predictions: how pairs are ranked. `published/README.md` explains the
//! files.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use semmoe_planner::cluster::Cluster;
use semmoe_planner::layout::Layout;
use semmoe_planner::memory::Memory;
use semmoe_planner::search::Served;
use semmoe_planner::shape::{Dtype, ModelShape, Precision};
use semmoe_planner::step::{Constants, Load, Target, decoding, predict, prefill_occupancy, step};
use semmoe_planner::workload::Workload;
use serde::Deserialize;

use crate::Outcome;

/// Published values within this factor are tied.
const TIE: f64 = 1.03;

/// A file with the figures of one source.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Source {
    source: String,
    url: String,
    date: String,
    groups: Vec<Group>,
}

/// Layouts of one model on one machine under one load.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    id: String,
    family: String,
    half: Half,
    model: String,
    cluster: String,
    /// Types of routed experts and of dense weights.
    weights: [String; 2],
    cache: String,
    input: f64,
    output: f64,
    metric: Metric,
    rows: Vec<Row>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Half {
    Tuning,
    HeldOut,
}

#[derive(Clone, Copy, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
enum Metric {
    OutputTokensPerSecond,
    TotalTokensPerSecond,
    /// Rate of prefill units.
    PrefillTokensPerSecond,
    /// Rate of decoding units.
    DecodeTokensPerSecond,
    /// Rate of one request.
    UserTokensPerSecond,
    TpotMs,
    TtftMs,
}

/// One layout of a group.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    layout: [u64; 5],
    load: Requests,
    value: f64,
}

/// Requests in flight of one unit.
#[derive(Clone, Copy, Deserialize)]
#[serde(untagged)]
enum Requests {
    Count(f64),
    Queue(Queue),
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Queue {
    /// All requests are queued: as many as the cache holds.
    Max,
    /// Each attention group prefills one prompt at a time.
    Chunk,
}

/// A row and its prediction. Throughputs of a unit are per GPU; larger is better.
struct Compared {
    layout: Layout,
    published: f64,
    /// `None` if the planner rejects the layout, which then ranks last.
    predicted: Option<f64>,
}

/// Correctly ranked pairs, and all pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Score {
    pub(crate) right: usize,
    pub(crate) pairs: usize,
}

impl Score {
    fn share(self) -> f64 {
        self.right as f64 / self.pairs.max(1) as f64
    }

    fn add(&mut self, other: Self) {
        self.right += other.right;
        self.pairs += other.pairs;
    }
}

/// Files that several groups share.
#[derive(Default)]
struct Files {
    shapes: HashMap<String, ModelShape>,
    clusters: HashMap<String, Cluster>,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("published")
}

fn sources() -> Outcome<Vec<Source>> {
    let entries = std::fs::read_dir(folder())?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()?;
    let mut files: Vec<PathBuf> =
        entries.into_iter().filter(|path| path.extension().is_some_and(|kind| kind == "toml")).collect();
    files.sort();
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(&path)?;
        toml::from_str(&text).map_err(|error| format!("{}: {error}", path.display()).into())
    };
    files.into_iter().map(read).collect()
}

impl Files {
    fn shape(&mut self, group: &Group) -> Outcome<ModelShape> {
        if !self.shapes.contains_key(&group.model) {
            let path = folder().join("models").join(format!("{}.json", group.model));
            let shape = ModelShape::from_config(&group.model, &std::fs::read_to_string(path)?)?;
            self.shapes.insert(group.model.clone(), shape);
        }
        let mut shape = self.shapes[&group.model].clone();
        let dtype = |name: &str| Dtype::of(name).ok_or_else(|| format!("{name} is not a type"));
        let [experts, dense] = [dtype(&group.weights[0])?, dtype(&group.weights[1])?];
        shape.precision = Precision { experts, dense, cache: dtype(&group.cache)?, ..shape.precision };
        Ok(shape)
    }

    fn cluster(&mut self, group: &Group) -> Outcome<Cluster> {
        if !self.clusters.contains_key(&group.cluster) {
            let path = folder().join("clusters").join(format!("{}.toml", group.cluster));
            let cluster = Cluster::from_toml(&group.cluster, &std::fs::read_to_string(path)?)?;
            self.clusters.insert(group.cluster.clone(), cluster);
        }
        Ok(self.clusters[&group.cluster].clone())
    }
}

impl Metric {
    /// Makes figures comparable: larger is better, throughputs of units are per GPU.
    fn comparable(self, value: f64, gpus: u64) -> f64 {
        match self {
            Self::UserTokensPerSecond => value,
            Self::TpotMs | Self::TtftMs => 1.0 / value,
            _ => value / gpus as f64,
        }
    }
}

impl Group {
    fn compared(&self, files: &mut Files, constants: &Constants) -> Outcome<Vec<Compared>> {
        let (shape, cluster) = (files.shape(self)?, files.cluster(self)?);
        let compared = |row: &Row| {
            let [pipeline, attention_tp, attention_dp, expert_tp, expert_ep] = row.layout;
            let layout = Layout { pipeline, attention_tp, attention_dp, expert_tp, expert_ep };
            if layout.gpus() > cluster.gpus() || layout.stage() != expert_tp * expert_ep {
                return Err(format!("{}: {} does not fit {}", self.id, layout.name(), self.cluster).into());
            }
            let target = Target { shape: &shape, cluster: &cluster, layout, constants };
            let comparable = |value| self.metric.comparable(value, layout.gpus());
            let predicted = self.predicted(&target, row.load)?.map(comparable);
            Ok(Compared { layout, published: comparable(row.value), predicted })
        };
        self.rows.iter().map(compared).collect()
    }

    /// The predicted metric of a layout. Uneven cuts are rounded up, as engines pad them.
    fn predicted(&self, target: &Target<'_>, requests: Requests) -> Outcome<Option<f64>> {
        let usable = target.cluster.gpu.memory * target.constants.memory_share;
        let Ok(memory) = Memory::of(target.shape, &target.layout, usable, target.constants.step_tokens) else {
            return Ok(None);
        };
        let most = memory.unit_tokens(&target.layout) / (self.input + self.output);
        let load = |concurrency| Load { concurrency, input_tokens: self.input, output_tokens: self.output };
        let count = match requests {
            Requests::Queue(Queue::Max) => return self.queued(target, &memory),
            Requests::Queue(Queue::Chunk) => target.layout.attention_dp as f64,
            Requests::Count(count) => count.min(most),
        };
        if most < 1.0 {
            return Ok(None);
        }
        let load = load(count);
        let found = predict(target, &load);
        let requests_per_second = count / (found.ttft + (self.output - 1.0).max(0.0) * found.tpot);
        Ok(Some(match self.metric {
            Metric::OutputTokensPerSecond => requests_per_second * self.output,
            Metric::TotalTokensPerSecond => requests_per_second * (self.input + self.output),
            Metric::PrefillTokensPerSecond => self.input / prefill_occupancy(target, &load),
            Metric::DecodeTokensPerSecond => count / step(target, &decoding(count, &load)).total(),
            Metric::UserTokensPerSecond => 1.0 / found.tpot,
            Metric::TpotMs => found.tpot * 1e3,
            Metric::TtftMs => found.ttft * 1e3,
        }))
    }

    /// The highest throughput that a unit reaches with all requests queued.
    fn queued(&self, target: &Target<'_>, memory: &Memory) -> Outcome<Option<f64>> {
        let text = format!("requests_per_second = 1\ninput_tokens = {}\noutput_tokens = {}\n", self.input, self.output);
        let workload = Workload::from_toml(&self.id, &text)?;
        let Ok(served) = Served::new(*target, &workload, 1, memory) else { return Ok(None) };
        let rates = served.curve().into_iter().map(|at| at.requests_per_second);
        Ok(rates.max_by(f64::total_cmp).map(|rate| rate * self.output))
    }
}

/// Whether the planner orders a pair as published; `None` for ties.
fn right(one: &Compared, other: &Compared) -> Option<bool> {
    let (better, worse) = if one.published > other.published { (one, other) } else { (other, one) };
    let tie = better.published / worse.published <= TIE;
    (!tie).then(|| better.predicted.unwrap_or(0.0) > worse.predicted.unwrap_or(0.0))
}

fn pairs(rows: &[Compared]) -> impl Iterator<Item = (&Compared, &Compared, bool)> {
    let after = |(at, one)| rows[at + 1..].iter().filter_map(move |other| Some((one, other, right(one, other)?)));
    rows.iter().enumerate().flat_map(after)
}

/// The scores of all families in each half.
pub(crate) fn scores(constants: &Constants) -> Outcome<BTreeMap<(Half, String), Score>> {
    let (mut files, mut scores) = (Files::default(), BTreeMap::new());
    for group in sources()?.iter().flat_map(|source| &source.groups) {
        let rows = group.compared(&mut files, constants)?;
        let mut score = Score::default();
        pairs(&rows).for_each(|(_, _, right)| score.add(Score { right: usize::from(right), pairs: 1 }));
        scores.entry((group.half, group.family.clone())).or_insert_with(Score::default).add(score);
    }
    Ok(scores)
}

/// All pairs of a half, and the mean of its families' shares, with equal weights.
pub(crate) fn summary(scores: &BTreeMap<(Half, String), Score>, half: Half) -> (Score, f64) {
    let families: Vec<Score> = scores.iter().filter(|((of, _), _)| *of == half).map(|(_, score)| *score).collect();
    let mut all = Score::default();
    families.iter().for_each(|score| all.add(*score));
    let counted: Vec<f64> = families.iter().filter(|score| score.pairs > 0).map(|score| score.share()).collect();
    (all, counted.iter().sum::<f64>() / counted.len().max(1) as f64)
}

/// Prints every row, or only pairs that are ranked the wrong way round, and the shares of correct pairs.
pub(crate) fn print(only_wrong: bool, constants: &Constants) -> Outcome<()> {
    let mut files = Files::default();
    for source in sources()? {
        println!("# {} ({}) {}", source.source, source.date, source.url);
        for group in &source.groups {
            let rows = group.compared(&mut files, constants)?;
            let figure = |row: &Compared| {
                let predicted = row.predicted.map_or_else(|| "rejected".to_owned(), |value| format!("{value:.4}"));
                format!("{}: {:.4}, predicted {predicted}", row.layout.name(), row.published)
            };
            if !only_wrong {
                println!("{} ({:?})", group.id, group.half);
                rows.iter().for_each(|row| println!("  {}", figure(row)));
            }
            for (one, other, _) in pairs(&rows).filter(|(_, _, right)| !right) {
                println!("wrong ({:?}): {}: {}; {}", group.half, group.id, figure(one), figure(other));
            }
        }
    }
    let scores = scores(constants)?;
    for ((half, family), score) in &scores {
        println!("{half:?}: {family}: {} of {}", score.right, score.pairs);
    }
    for half in [Half::Tuning, Half::HeldOut] {
        let (all, families) = summary(&scores, half);
        let share = 100.0 * all.share();
        println!(
            "{half:?}: {} of {} pairs right ({share:.1}%), mean of families {:.1}%",
            all.right,
            all.pairs,
            100.0 * families
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// FNV-1a, 64 bits.
    fn hash(name: &str) -> u64 {
        let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        name.bytes().fold(0xcbf2_9ce4_8422_2325, mix)
    }

    #[test]
    fn halves_follow_the_rule() {
        for group in sources().unwrap().iter().flat_map(|source| &source.groups) {
            let half = if hash(&group.family) >> 32 & 1 == 1 { Half::HeldOut } else { Half::Tuning };
            assert_eq!(group.half, half, "{}", group.id);
        }
    }

    #[test]
    fn a_pair_counts_if_it_is_no_tie() {
        let layout = Layout { pipeline: 1, attention_tp: 1, attention_dp: 1, expert_tp: 1, expert_ep: 1 };
        let row = |published, predicted| Compared { layout, published, predicted };
        let rows = [row(1.0, Some(5.0)), row(1.02, Some(4.0)), row(2.0, Some(6.0)), row(3.0, None)];
        let found: Vec<bool> = pairs(&rows).map(|(_, _, right)| right).collect();
        assert_eq!(found, [true, false, true, false, false], "a rejected layout ranks last");
    }

    /// MixServe's H20 cluster, if its largest batch, 16, is per engine as vLLM counts it, so attention DP has one per
    /// group: that explains its gain over pipeline stages.
    #[test]
    fn mixserve_follows_from_a_batch_for_each_group() {
        let mut files = Files::default();
        for mut group in sources().unwrap().into_iter().flat_map(|source| source.groups) {
            if !(group.id.starts_with("mixserve-h20") && group.id.ends_with("throughput")) {
                continue;
            }
            for row in &mut group.rows {
                row.load = Requests::Count(16.0 * row.layout[2] as f64);
            }
            let rows = group.compared(&mut files, &Constants::uncalibrated()).unwrap();
            let published = rows[1].published / rows[0].published;
            let predicted = rows[1].predicted.unwrap() / rows[0].predicted.unwrap();
            assert!((predicted - published).abs() < 0.15, "{}: {predicted}, published {published}", group.id);
        }
    }

    /// Correctly ranked pairs of all pairs. They change only with the planner's model or the files.
    #[test]
    fn counts_of_right_pairs() {
        let scores = scores(&Constants::uncalibrated()).unwrap();
        let of = |half| summary(&scores, half).0;
        assert_eq!([of(Half::Tuning), of(Half::HeldOut)], RIGHT);
    }

    const RIGHT: [Score; 2] = [Score { right: 91, pairs: 114 }, Score { right: 165, pairs: 200 }];
}
