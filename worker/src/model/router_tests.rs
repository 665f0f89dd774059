//! Choices and weights, against the definition of each rule.

use super::*;

const SOFTMAX: Router = Router { scoring: Scoring::Softmax, groups: None, normalise: true, scale: 1.0 };

fn route(router: &Router, correction: Option<&[f32]>, logits: &[f32], top_k: usize) -> (Vec<u16>, Vec<f32>) {
    let (mut experts, mut weights) = (vec![0; top_k], vec![0.0; top_k]);
    let choice = Choice { router, num_experts: logits.len(), top_k, correction };
    choice.route(logits, &mut experts, &mut weights, &mut RouterScratch::default());
    (experts, weights)
}

#[test]
fn the_strongest_come_first_and_ties_by_id() {
    let (experts, weights) = route(&SOFTMAX, None, &[1.0, 3.0, 2.0, 3.0, 0.0, f32::NAN, 2.5, -1.0], 3);
    assert_eq!(experts, [1, 3, 6]);
    assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6);
    assert!((weights[2] / weights[0] - (-0.5f32).exp()).abs() < 1e-6);
}

#[test]
fn without_normalisation_the_weights_are_the_softmax_over_all_scaled() {
    let router = Router { normalise: false, scale: 16.0, ..SOFTMAX };
    let (experts, weights) = route(&router, None, &[0.0, 1.0], 1);
    assert_eq!(experts, [1]);
    assert!((weights[0] - 16.0 / (1.0 + (-1.0f32).exp())).abs() < 1e-5);
}

#[test]
fn all_experts_can_be_chosen() {
    let groups = Some(GroupLimit { groups: 2, kept: 2, by: GroupScore::TwoBest });
    for router in [SOFTMAX, Router { scoring: Scoring::CorrectedSigmoid, groups, ..SOFTMAX }] {
        let (mut experts, _) = route(&router, None, &[f32::NAN; 4], 4);
        experts.sort_unstable();
        assert_eq!(experts, [0, 1, 2, 3]);
    }
}

#[test]
fn only_the_best_groups_are_chosen_from() {
    // Groups of two: their best are 5, 4, 3; their sums 5, 7, 6.
    let logits = [5.0, 0.0, 4.0, 3.0, 3.0, 3.0];
    let limited = |kept, by| Router { groups: Some(GroupLimit { groups: 3, kept, by }), ..SOFTMAX };
    assert_eq!(route(&limited(1, GroupScore::Best), None, &logits, 2).0, [0, 1]);
    assert_eq!(route(&limited(2, GroupScore::Best), None, &logits, 3).0, [0, 2, 3]);
    assert_eq!(route(&limited(1, GroupScore::TwoBest), None, &logits, 2).0, [2, 3]);
    assert_eq!(route(&limited(2, GroupScore::TwoBest), None, &logits, 3).0, [2, 3, 4]);
    // Excluded experts still count in a softmax over all.
    let router = Router { normalise: false, ..limited(1, GroupScore::TwoBest) };
    let total: f32 = logits.iter().map(|logit| (logit - 4.0f32).exp()).sum();
    assert!((route(&router, None, &logits, 1).1[0] - 1.0 / total).abs() < 1e-6);
}

#[test]
fn a_correction_counts_for_the_choice_alone() {
    let router = Router { scoring: Scoring::CorrectedSigmoid, normalise: false, scale: 2.0, groups: None };
    let (experts, weights) = route(&router, Some(&[0.0, 0.0, 0.9]), &[1.0, 2.0, -1.0], 2);
    assert_eq!(experts, [2, 1]);
    let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
    assert!((weights[0] - 2.0 * sigmoid(-1.0)).abs() < 1e-6 && (weights[1] - 2.0 * sigmoid(2.0)).abs() < 1e-6);
}

#[test]
fn groups_hold_whatever_the_correction() {
    // A correction may make every score of a kept group negative: excluded experts are still not chosen.
    let groups = Some(GroupLimit { groups: 2, kept: 1, by: GroupScore::TwoBest });
    let router = Router { scoring: Scoring::CorrectedSigmoid, groups, ..SOFTMAX };
    let (mut experts, _) = route(&router, Some(&[-2.0, -2.0, -3.0, -3.0]), &[0.0; 4], 2);
    experts.sort_unstable();
    assert_eq!(experts, [0, 1]);
}
