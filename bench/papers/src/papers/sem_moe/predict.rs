//! How well tokens, previous layers and topics predict experts, on the bundled model.

use std::collections::HashMap;

use semmoe_profiler::show::{Input, Study, study};
use semmoe_tables::{LayerIdx, Placement, Profile, TokenId, Trace};

use super::recorded::{Recorded, recorded};
use super::solved::{GROUPS, copied, ours};
use crate::Outcome;
use crate::papers::Verdict::{Corrected, Refuted};
use crate::papers::{Found, Size, Verdict};

/// The profiler's study of the requests solved on: one half predicts, the other judges.
fn studied(recorded: &Recorded) -> Outcome<Study> {
    let copy = copied(recorded)?;
    Ok(study(&Input::Trace(copy), None)?)
}

/// Minimum and maximum over the layers.
fn range(values: impl Iterator<Item = f64> + Clone) -> [f64; 2] {
    [values.clone().fold(f64::INFINITY, f64::min), values.fold(0.0, f64::max)]
}

pub(super) fn table_1(size: Size) -> Outcome<Found> {
    let study = studied(recorded(size)?)?;
    let [f1, most] = range(study.layers.iter().map(|layer| layer.f1.p50));
    let [mean, _] = range(study.layers.iter().filter_map(|layer| layer.f1_mean));
    let [hot, hottest] = range(study.layers.iter().map(|layer| layer.cumulative_hotness.p50));
    let [other, others] = range(study.layers.iter().map(|layer| layer.hottest_other.p50));
    let mut table = String::from("layer   F1 p25, p50, p75   F1 of occurrences   hottest k   hottest other\n");
    for layer in &study.layers {
        let f1 = &layer.f1;
        table += &format!(
            "{:>5}   {:.2}  {:.2}  {:.2}   {:>15.2}   {:>9.2}   {:>11.3}\n",
            layer.layer_id,
            f1.p25,
            f1.p50,
            f1.p75,
            layer.f1_mean.unwrap_or_default(),
            layer.cumulative_hotness.p50,
            layer.hottest_other.p50
        );
    }
    let ours = format!(
        "median F1 on other requests {f1:.2} to {most:.2} (occurrences from {mean:.2}); hottest k {hot:.2} to {hottest:.2}, next {other:.3} to {others:.3}"
    );
    // The paper's lowest medians: F1 0.833, hottest k 0.833.
    let verdict = Verdict::of(f1 >= 0.833 && hot >= 0.833, Corrected);
    Ok(Found::new(verdict, ours).with_table(table))
}

pub(super) fn figure_6b(size: Size) -> Outcome<Found> {
    let recorded = recorded(size)?;
    let study = studied(recorded)?;
    let [kurtosis, most] = range(study.layers.iter().map(|layer| layer.kurtosis.p50));
    // A quarter of the requests is counted, the rest judges.
    let quarter = recorded.solving.requests() / 4;
    let counted = Profile::of_trace(&semmoe_tables::TraceBuilder::select(&recorded.solving, |at, _| at < quarter)?)?;
    let top_k = usize::from(recorded.solving.model().top_k);
    let hottest = Hottest::of(&counted, top_k);
    let (mut hits, mut predicted, mut all) = (0.0, 0.0, 0.0);
    for request in recorded.solving.iter().skip(quarter) {
        for (at, token) in request.tokens() {
            for (layer, route) in request.routes(at) {
                all += top_k as f64;
                if let Some(experts) = hottest.0.get(&(layer.index(), token)) {
                    predicted += experts.len() as f64;
                    hits += route.experts().filter(|expert| experts.contains(&(expert.index() as u16))).count() as f64;
                }
            }
        }
    }
    let (precision, recall) = (hits / predicted, hits / all);
    let f1 = 2.0 * precision * recall / (precision + recall);
    let ours = format!(
        "median kurtosis {kurtosis:.1} to {most:.1}; precision {:.1}%, recall {:.1}%, F1 {:.1}%",
        precision * 1e2,
        recall * 1e2,
        f1 * 1e2
    );
    let even = {
        // Kurtosis if a token's k experts are always the same.
        let share = top_k as f64 / f64::from(recorded.solving.model().num_experts);
        1.0 / (share * (1.0 - share)) - 3.0
    };
    let verdict =
        Verdict::of(kurtosis > 8.0 && (precision - 0.963).abs() < 0.05 && (f1 - 0.788).abs() < 0.05, Corrected);
    let table = format!("kurtosis of a token that always has the same k experts: {even:.1}\n");
    Ok(Found::new(verdict, ours).with_table(table))
}

/// The experts that a token activates most often, by layer.
struct Hottest(HashMap<(usize, TokenId), Vec<u16>>);

impl Hottest {
    fn of(profile: &Profile, top_k: usize) -> Self {
        let mut found = HashMap::new();
        for layer in 0..profile.model().layers() {
            for (token, _) in profile.seen() {
                let row = profile.row(LayerIdx::new(layer as u16), token);
                let mut experts: Vec<(u16, u32)> = row.iter().collect();
                experts.sort_by_key(|(expert, count)| (std::cmp::Reverse(*count), *expert));
                found.insert((layer, token), experts.iter().take(top_k).map(|(expert, _)| *expert).collect());
            }
        }
        Self(found)
    }
}

/// The group that hosts most of a token's experts, by layer and position.
fn groups(trace: &Trace, placement: &Placement) -> Vec<Vec<u16>> {
    let mut rows = Vec::new();
    for request in trace.iter() {
        for at in 0..request.token_ids().len() {
            let main = |layer: usize| {
                let layer = LayerIdx::new(layer as u16);
                let mut counts = [0; GROUPS as usize];
                for expert in request.route(at, layer).into_iter().flat_map(|route| route.experts()) {
                    counts[placement.group_of(layer, expert).index()] += 1;
                }
                let most = counts.iter().max().copied().unwrap_or(0);
                counts.iter().position(|count| *count == most).unwrap_or(0) as u16
            };
            rows.push((0..placement.layers()).map(main).collect());
        }
    }
    rows
}

/// How often a layer's group is the likeliest one after the groups of the `back` previous layers, counted on other
/// requests. Unseen sequences count as misses.
fn followed(counted: &[Vec<u16>], judged: &[Vec<u16>], back: usize) -> f64 {
    let layers = counted.first().map_or(0, Vec::len);
    let (mut right, mut all) = (0usize, 0usize);
    // All look-backs are judged on these layers.
    for layer in LOOK_BACK..layers {
        let mut after: HashMap<&[u16], [u32; GROUPS as usize]> = HashMap::new();
        for row in counted {
            after.entry(&row[layer - back..layer]).or_default()[usize::from(row[layer])] += 1;
        }
        for row in judged {
            all += 1;
            let likeliest = after.get(&row[layer - back..layer]).and_then(|counts| {
                let most = counts.iter().max()?;
                counts.iter().position(|count| count == most)
            });
            right += usize::from(likeliest == Some(usize::from(row[layer])));
        }
    }
    right as f64 / all.max(1) as f64
}

const LOOK_BACK: usize = 5;

pub(super) fn figure_6c(size: Size) -> Outcome<Found> {
    let recorded = recorded(size)?;
    let placement = ours(size)?.tables.placement();
    let (counted, judged) = (groups(&recorded.solving, placement), groups(&recorded.judging, placement));
    let found: Vec<f64> = (1..=LOOK_BACK).map(|back| followed(&counted, &judged, back)).collect();
    let chance = followed(&counted, &judged, 0);
    let rises = found.windows(2).all(|pair| pair[1] > pair[0] - 1e-3);
    let shown: Vec<String> = found.iter().map(|share| format!("{share:.2}")).collect();
    let ours = format!("looking back 1 to 5 layers: {}; without {chance:.2}", shown.join(", "));
    let last = found[LOOK_BACK - 1];
    Ok(Found::new(Verdict::of(rises && (last - 0.7).abs() < 0.07, Corrected), ours))
}

/// Square roots of the shares of a request's activations, all layers and experts.
fn shares(trace: &Trace, request: usize) -> Vec<f64> {
    let experts = usize::from(trace.model().num_experts);
    let mut counts = vec![0.0; trace.model().layers() * experts];
    let request = trace.request(request);
    for at in 0..request.token_ids().len() {
        for (layer, route) in request.routes(at) {
            route.experts().for_each(|expert| counts[layer.index() * experts + expert.index()] += 1.0);
        }
    }
    let all = counts.iter().sum::<f64>().max(1.0);
    counts.iter().map(|count| (count / all).sqrt()).collect()
}

/// How often the request with the most similar experts is of the same kind.
pub(super) fn figure_6a(size: Size) -> Outcome<Found> {
    let recorded = recorded(size)?;
    let kinds = &recorded.kinds;
    let all: Vec<Vec<f64>> = (0..kinds.len()).map(|request| shares(&recorded.judging, request)).collect();
    let apart = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| (x - y).powi(2)).sum::<f64>();
    let nearest = |one: usize| {
        (0..all.len())
            .filter(|other| *other != one)
            .min_by(|a, b| apart(&all[one], &all[*a]).total_cmp(&apart(&all[one], &all[*b])))
    };
    let same = (0..all.len()).filter(|&one| nearest(one).is_some_and(|other| kinds[one] == kinds[other])).count();
    let mut counts: HashMap<&str, f64> = HashMap::new();
    kinds.iter().for_each(|kind| *counts.entry(kind).or_default() += 1.0);
    let count = kinds.len() as f64;
    let chance: f64 = counts.values().map(|of| of / count * (of - 1.0) / (count - 1.0)).sum();
    let found = same as f64 / count;
    let ours = format!(
        "the nearest request is of the same of {} kinds in {:.0}%, by chance {:.0}%",
        counts.len(),
        found * 1e2,
        chance * 1e2
    );
    Ok(Found::new(Verdict::of(found > 3.0 * chance, Refuted), ours))
}
