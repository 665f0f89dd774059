//! The choice of experts: softmax over the router's logits, the k largest, their weights.

/// Chooses the experts of each token.
///
/// - `logits` `[n, N]`
/// - `experts`, `weights` `[n, k]`: filled, strongest first, equal logits by ascending id
///
/// The weights are the softmax over all N, scaled to sum to 1 over the k if `normalise`.
pub(super) fn route(
    logits: &[f32],
    num_experts: usize,
    normalise: bool,
    top_k: usize,
    experts: &mut [u16],
    weights: &mut [f32],
) {
    let tokens = logits.chunks_exact(num_experts);
    let chosen = experts.chunks_exact_mut(top_k).zip(weights.chunks_exact_mut(top_k));
    for (logits, (experts, weights)) in tokens.zip(chosen) {
        choose(logits, experts);
        let max = logits[usize::from(experts[0])];
        for (weight, &expert) in weights.iter_mut().zip(experts.iter()) {
            *weight = (logits[usize::from(expert)] - max).exp();
        }
        let total: f32 =
            if normalise { weights.iter().sum() } else { logits.iter().map(|logit| (logit - max).exp()).sum() };
        for weight in weights {
            *weight /= total;
        }
    }
}

/// The `chosen.len()` largest, by insertion: k is small. Ids are distinct whatever the logits are.
fn choose(logits: &[f32], chosen: &mut [u16]) {
    let mut count = 0;
    for (expert, &logit) in logits.iter().enumerate() {
        let beats = |other: u16| logit > logits[usize::from(other)];
        if count == chosen.len() {
            if !beats(chosen[count - 1]) {
                continue;
            }
            count -= 1;
        }
        let mut at = count;
        while at > 0 && beats(chosen[at - 1]) {
            chosen[at] = chosen[at - 1];
            at -= 1;
        }
        chosen[at] = expert as u16;
        count += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_strongest_come_first_and_ties_by_id() {
        let logits = [1.0, 3.0, 2.0, 3.0, 0.0, f32::NAN, 2.5, -1.0];
        let (mut experts, mut weights) = ([0; 3], [0.0; 3]);
        route(&logits, 8, true, 3, &mut experts, &mut weights);
        assert_eq!(experts, [1, 3, 6]);
        assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        assert!((weights[2] / weights[0] - (-0.5f32).exp()).abs() < 1e-6);
    }

    #[test]
    fn without_normalisation_the_weights_are_the_softmax_over_all() {
        let (mut experts, mut weights) = ([0; 1], [0.0; 1]);
        route(&[0.0, 1.0], 2, false, 1, &mut experts, &mut weights);
        assert_eq!(experts, [1]);
        assert!((weights[0] - 1.0 / (1.0 + (-1.0f32).exp())).abs() < 1e-6);
    }

    #[test]
    fn all_experts_can_be_chosen() {
        let (mut experts, mut weights) = ([0; 4], [0.0; 4]);
        route(&[f32::NAN; 4], 4, true, 4, &mut experts, &mut weights);
        experts.sort_unstable();
        assert_eq!(experts, [0, 1, 2, 3]);
    }
}
