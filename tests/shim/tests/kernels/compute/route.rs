//! The choice of experts against a sort.

use fastrand::Rng;
use semmoe_kernels_cuda::LaunchError;
use semmoe_kernels_cuda::compute::{GroupLimit, GroupScore, Route, Scoring};
use semmoe_kernels_shim::{HostBuffer, Shim};
use semmoe_reference::data::same;

use super::{close, numbers, run};
use crate::support::{holding, read, shim};

#[derive(Clone, Copy, Debug)]
struct Case {
    num_experts: usize,
    top_k: usize,
    scoring: Scoring,
    corrected: bool,
    normalise: bool,
    groups: Option<GroupLimit>,
}

const ROWS: usize = 5;
const SCALE: f32 = 2.5;

impl Case {
    fn softmax(num_experts: usize, top_k: usize, normalise: bool) -> Self {
        Self { num_experts, top_k, scoring: Scoring::Softmax, corrected: false, normalise, groups: None }
    }

    fn sigmoid(num_experts: usize, top_k: usize, normalise: bool) -> Self {
        Self { scoring: Scoring::Sigmoid, corrected: true, ..Self::softmax(num_experts, top_k, normalise) }
    }

    fn of_groups(self, groups: u64, kept: u64, by: GroupScore) -> Self {
        Self { groups: Some(GroupLimit { groups, kept, by }), ..self }
    }

    fn score(&self, logit: f32) -> f32 {
        if self.scoring == Scoring::Softmax { logit } else { 1.0 / (1.0 + (-logit).exp()) }
    }

    fn chosen(&self, logits: &[f32], correction: &[f32]) -> Vec<u16> {
        let more = |id: usize| if self.corrected { correction[id] } else { 0.0 };
        let mut scores: Vec<f32> = logits.iter().enumerate().map(|(id, &x)| self.score(x) + more(id)).collect();
        if let Some(limit) = self.groups {
            let size = self.num_experts / limit.groups as usize;
            let worth: Vec<f32> = scores.chunks(size).map(|group| worth(group, limit.by)).collect();
            let kept = strongest(&worth, limit.kept as usize);
            for (id, score) in scores.iter_mut().enumerate() {
                if !kept.contains(&((id / size) as u16)) {
                    *score = f32::NEG_INFINITY;
                }
            }
        }
        strongest(&scores, self.top_k)
    }

    fn weights(&self, logits: &[f32], chosen: &[u16]) -> Vec<f64> {
        let max = f64::from(logits[usize::from(chosen[0])]);
        let weight = |logit: f32| match self.scoring {
            Scoring::Softmax => (f64::from(logit) - max).exp(),
            Scoring::Sigmoid => 1.0 / (1.0 + f64::from(-logit).exp()),
        };
        let of_chosen: Vec<f64> = chosen.iter().map(|&id| weight(logits[usize::from(id)])).collect();
        let total: f64 = match (self.normalise, self.scoring) {
            (true, _) => of_chosen.iter().sum(),
            (false, Scoring::Softmax) => logits.iter().map(|&logit| weight(logit)).sum(),
            (false, Scoring::Sigmoid) => 1.0,
        };
        of_chosen.iter().map(|weight| weight / total * f64::from(SCALE)).collect()
    }
}

fn worth(group: &[f32], by: GroupScore) -> f32 {
    let best = strongest(group, 2.min(group.len()));
    let second = best.get(1).map_or(f32::NEG_INFINITY, |&id| group[usize::from(id)]);
    let best = group[usize::from(best[0])];
    if by == GroupScore::Best { best } else { best + second }
}

fn strongest(scores: &[f32], count: usize) -> Vec<u16> {
    let mut ids: Vec<u16> = (0..scores.len() as u16).collect();
    let score = |id: &u16| scores[usize::from(*id)] + 0.0;
    ids.sort_by(|a, b| score(b).total_cmp(&score(a)));
    ids.truncate(count);
    ids
}

fn call(case: &Case, [logits, correction, experts, weights]: [&HostBuffer; 4], rows: usize) -> Route {
    Route {
        ids: None,
        logits: logits.buffer(),
        correction: case.corrected.then_some(correction.buffer()),
        scoring: case.scoring,
        normalise: case.normalise,
        scale: SCALE,
        groups: case.groups,
        experts: experts.buffer(),
        weights: weights.buffer(),
        rows: rows as u64,
        num_experts: case.num_experts as u64,
        top_k: case.top_k as u64,
    }
}

fn route(shim: &Shim, case: &Case, seed: u64) -> Result<(), String> {
    let mut rng = Rng::with_seed(seed);
    let Case { num_experts, top_k, .. } = *case;
    // Rows of any logits, and of few different ones.
    let few = [-2.0f32, -0.0, 0.0, 1.5, 3.0, -40.0];
    let logits: Vec<f32> = (0..ROWS * num_experts)
        .map(|at| if at / num_experts % 2 == 0 { rng.f32() * 8.0 - 4.0 } else { few[rng.usize(0..few.len())] })
        .collect();
    let correction: Vec<f32> = numbers(&mut rng, num_experts);
    let (logits_at, correction_at) = (holding(&logits), holding(&correction));
    let (experts, weights) = (HostBuffer::poisoned(ROWS * top_k * 2), HostBuffer::poisoned(ROWS * top_k * 4));
    let call = call(case, [&logits_at, &correction_at, &experts, &weights], ROWS);
    run(shim, &[call.launch().unwrap()], seed)?;
    let chosen: Vec<Vec<u16>> = logits.chunks(num_experts).map(|row| case.chosen(row, &correction)).collect();
    same("experts", &read::<u16>(&experts), &chosen.concat())?;
    let expected = logits.chunks(num_experts).zip(&chosen).flat_map(|(row, chosen)| case.weights(row, chosen));
    close("weights", &read::<f32>(&weights), &expected.collect::<Vec<_>>())
}

#[test]
fn the_strongest_experts_are_chosen_and_weighted() {
    let Some(shim) = shim() else { return };
    let two = GroupScore::TwoBest;
    let cases = [
        Case::softmax(8, 2, true),
        Case::softmax(60, 4, false),
        Case::softmax(128, 8, true),
        Case::softmax(1, 1, false),
        Case::softmax(32, 32, true),
        Case::softmax(1000, 8, false),
        Case::softmax(160, 6, false).of_groups(8, 3, GroupScore::Best),
        Case::softmax(4, 2, false).of_groups(4, 3, GroupScore::Best),
        Case::sigmoid(60, 5, true),
        Case::sigmoid(256, 8, true).of_groups(8, 4, two),
        Case::sigmoid(64, 6, false).of_groups(32, 3, two),
        Case::sigmoid(9, 3, true).of_groups(3, 1, two),
    ];
    for (seed, case) in cases.iter().enumerate() {
        route(shim, case, seed as u64).unwrap_or_else(|error| panic!("{case:?}: {error}"));
    }
}

#[test]
fn nan_loses_and_a_row_of_nan_has_distinct_experts() {
    let Some(shim) = shim() else { return };
    let case = Case::softmax(40, 3, true);
    let mut logits = vec![f32::NAN; 2 * 40];
    logits[33] = -1e30;
    logits[7] = f32::NEG_INFINITY;
    let (logits_at, none) = (holding(&logits), HostBuffer::zeroed(0));
    let (experts, weights) = (HostBuffer::poisoned(12), HostBuffer::poisoned(24));
    let call = call(&case, [&logits_at, &none, &experts, &weights], 2);
    run(shim, &[call.launch().unwrap()], 1).unwrap();
    same("experts", &read::<u16>(&experts), &[33, 7, 0, 0, 1, 2]).unwrap();
}

#[test]
fn choices_that_cannot_be_made_are_refused() {
    let memory = HostBuffer::zeroed(1 << 16);
    let launch = |case: Case| call(&case, [&memory; 4], 2).launch();
    let out_of_range = |case| matches!(launch(case), Err(LaunchError::OutOfRange { .. }));
    let softmax = Case::softmax(64, 8, true);
    assert!(launch(softmax).is_ok());
    assert!(out_of_range(Case::softmax(4, 5, true)) && out_of_range(Case::softmax(1025, 2, true)));
    assert!(out_of_range(Case { corrected: true, ..softmax }), "softmax has no correction");
    let best = GroupScore::Best;
    assert!(out_of_range(softmax.of_groups(3, 2, best)), "groups of different size");
    assert!(out_of_range(softmax.of_groups(16, 1, best)), "four experts for eight choices");
    assert!(out_of_range(softmax.of_groups(8, 9, best)) && out_of_range(softmax.of_groups(64, 9, best)));
}
