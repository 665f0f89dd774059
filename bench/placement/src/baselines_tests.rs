//! Every baseline finds the structure that it is designed to find.

use super::*;

/// Two hidden halves of eight experts: odd and even ones are co-activated.
fn planted() -> LayerCounts {
    let experts = 8;
    let load: Vec<f64> = (0..experts).map(|expert| 100.0 + 10.0 * expert as f64).collect();
    let alike = |a: usize, b: usize| if a % 2 == b % 2 { 3.0 } else { 1.0 };
    let total: f64 = load.iter().sum();
    let together = Array2::from_shape_fn((8, 8), |(a, b)| alike(a, b) * load[a] * load[b] / total);
    LayerCounts { experts, load, together, tokens: total / 2.0 }
}

fn halves(group_of: &[u16]) -> bool {
    (0..8).all(|expert| (group_of[expert] == group_of[expert % 2]) && group_of[0] != group_of[1])
}

#[test]
fn coactivation_and_spectral_find_the_halves() {
    let counts = planted();
    assert!(halves(&coactivation(&counts, 2)));
    assert!(halves(&coactivation_by_load(&counts, 2)));
    assert!(halves(&spectral(&counts, 2, &mut fastrand::Rng::with_seed(1))));
}

#[test]
fn even_loads_are_even() {
    let counts = planted();
    let most = |group_of: &[u16]| {
        let load = |group: u16| -> f64 { (0..8).filter(|&e| group_of[e] == group).map(|e| counts.load[e]).sum() };
        (0..2).map(load).fold(0.0, f64::max)
    };
    let (by_load, improved) = (eplb(&counts, 2), even_load(&counts, 2));
    assert_eq!(most(&improved), 540.0, "of 1080");
    assert!(most(&by_load) >= most(&improved) && most(&by_load) < most(&[0, 0, 0, 0, 1, 1, 1, 1]));
}

#[test]
fn every_group_of_every_baseline_is_full() {
    let counts = planted();
    let mut rng = fastrand::Rng::with_seed(2);
    let flows = vec![counts.together.clone()];
    for groups in [1, 2, 4, 8] {
        let mut layers = vec![
            random(8, groups, &mut rng),
            eplb(&counts, groups),
            coactivation(&counts, groups),
            coactivation_by_load(&counts, groups),
            spectral(&counts, groups, &mut rng),
        ];
        layers.extend(moetuner(&[planted(), planted()], &flows, groups));
        layers.extend(exflow(8, &flows, groups, &mut rng));
        for layer in layers {
            for group in 0..groups {
                let held = layer.iter().filter(|&&at| usize::from(at) == group).count();
                assert_eq!(held, 8 / groups, "{layer:?}");
            }
        }
    }
}

/// Expert e of a layer is followed by expert 7 - e in the next.
#[test]
fn exflow_and_moetuner_follow_the_tokens() {
    let flow = Array2::from_shape_fn((8, 8), |(a, b)| if a + b == 7 { 1.0 } else { 0.0 });
    let flows = vec![flow.clone(), flow];
    let placed = exflow(8, &flows, 4, &mut fastrand::Rng::with_seed(3));
    assert_eq!(kept_between(&flows, &placed), 16.0, "nothing leaves its device: {placed:?}");
    // MoETuner clusters by load alone; only its devices follow the tokens.
    let tuned = moetuner(&[planted(), planted(), planted()], &flows, 4);
    let swapped: Vec<Groups> = tuned
        .iter()
        .enumerate()
        .map(|(layer, groups)| groups.iter().map(|&group| if layer == 1 { 3 - group } else { group }).collect())
        .collect();
    assert!(kept_between(&flows, &tuned) >= kept_between(&flows, &swapped));
}
