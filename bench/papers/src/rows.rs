//! Predictions for measured rows, for `python/fit.py`, so that the fit uses the planner's model and not a copy.
//!
//! Each line of the file is a row: `model` (a path to a config.json), `cluster` (a path to a cluster.toml), `weights`
//! and `cache` (types), `decode` and `prefill` (degrees PP, TP, DP, expert TP, EP), `split` (prefill has its own
//! units), `concurrency` (requests in flight of a decoding unit), `arriving` (of a prefill unit), `input`, `output`.
//! Each line on standard input is a list of `[first, end, constants]`, ranges of rows. It is answered by one line: a
//! list of `[TTFT, TPOT]` in seconds for these rows, null where a layout cannot run the shape.

use std::collections::HashMap;
use std::io::BufRead;
use std::path::Path;

use semmoe_planner::cluster::Cluster;
use semmoe_planner::layout::Layout;
use semmoe_planner::shape::{Dtype, ModelShape, Precision};
use semmoe_planner::step::{Constants, Load, Target, decoding, predict, step};
use serde::Deserialize;

use crate::Outcome;

#[derive(Deserialize)]
struct Row {
    model: String,
    cluster: String,
    /// Types of routed experts and of dense weights.
    weights: [String; 2],
    cache: String,
    decode: [u64; 5],
    prefill: [u64; 5],
    split: bool,
    concurrency: f64,
    arriving: f64,
    input: f64,
    output: f64,
}

/// A row with its files parsed.
struct Case {
    shape: ModelShape,
    cluster: Cluster,
    decode: Layout,
    prefill: Layout,
    split: bool,
    load: Load,
    arriving: f64,
}

#[derive(Default)]
struct Files {
    shapes: HashMap<String, ModelShape>,
    clusters: HashMap<String, Cluster>,
}

impl Files {
    fn case(&mut self, line: &str) -> Outcome<Case> {
        let row: Row = serde_json::from_str(line)?;
        if !self.shapes.contains_key(&row.model) {
            let shape = ModelShape::from_config(&row.model, &std::fs::read_to_string(&row.model)?)?;
            self.shapes.insert(row.model.clone(), shape);
        }
        if !self.clusters.contains_key(&row.cluster) {
            let cluster = Cluster::from_toml(&row.cluster, &std::fs::read_to_string(&row.cluster)?)?;
            self.clusters.insert(row.cluster.clone(), cluster);
        }
        let dtype = |name: &str| Dtype::of(name).ok_or_else(|| format!("{name} is not a type"));
        let mut shape = self.shapes[&row.model].clone();
        let [experts, dense] = [dtype(&row.weights[0])?, dtype(&row.weights[1])?];
        shape.precision = Precision { experts, dense, cache: dtype(&row.cache)?, ..shape.precision };
        Ok(Case {
            shape,
            cluster: self.clusters[&row.cluster].clone(),
            decode: layout(row.decode),
            prefill: layout(row.prefill),
            split: row.split,
            arriving: row.arriving,
            load: Load { concurrency: row.concurrency, input_tokens: row.input, output_tokens: row.output },
        })
    }
}

fn layout([pipeline, attention_tp, attention_dp, expert_tp, expert_ep]: [u64; 5]) -> Layout {
    Layout { pipeline, attention_tp, attention_dp, expert_tp, expert_ep }
}

/// Whether the degrees are consistent. Uneven cuts are rounded up, as engines pad them.
fn runs(case: &Case, layout: &Layout) -> bool {
    let degrees = [layout.pipeline, layout.attention_tp, layout.attention_dp, layout.expert_tp, layout.expert_ep];
    degrees.iter().all(|degree| *degree > 0)
        && layout.stage() == layout.expert_tp * layout.expert_ep
        && layout.gpus() <= case.cluster.gpus()
        && layout.expert_ep <= case.shape.experts
}

fn predicted(case: &Case, constants: &Constants) -> Option<[f64; 2]> {
    if !runs(case, &case.decode) || !runs(case, &case.prefill) {
        return None;
    }
    let target = |layout| Target { shape: &case.shape, cluster: &case.cluster, layout, constants };
    let (decode, prefill) = (target(case.decode), target(case.prefill));
    if !case.split {
        let found = predict(&decode, &case.load);
        return Some([found.ttft, found.tpot]);
    }
    // With separate prefill units nothing delays decoding.
    let ttft = predict(&prefill, &Load { concurrency: case.arriving, ..case.load }).ttft;
    Some([ttft, step(&decode, &decoding(case.load.concurrency, &case.load)).total()])
}

/// Answers every line on standard input from the rows of `file`.
pub(crate) fn answer(file: &Path) -> Outcome<()> {
    let mut files = Files::default();
    let text = std::fs::read_to_string(file)?;
    let cases: Vec<Case> = text.lines().map(|line| files.case(line)).collect::<Result<_, _>>()?;
    for line in std::io::stdin().lock().lines() {
        let ranges: Vec<(usize, usize, Constants)> = serde_json::from_str(&line?)?;
        let mut answers = Vec::new();
        for (first, end, constants) in ranges {
            constants.check()?;
            let chosen = cases.get(first..end).ok_or_else(|| format!("there are no rows {first} to {end}"))?;
            answers.extend(chosen.iter().map(|case| predicted(case, &constants)));
        }
        println!("{}", serde_json::to_string(&answers)?);
    }
    Ok(())
}
