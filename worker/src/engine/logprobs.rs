//! Log-probabilities of a token and its alternatives from the model's raw logits: before temperature, top-k and top-p.

use super::request::TokenLogprobs;

/// Replaces minus infinity, which JSON cannot represent.
const LEAST: f32 = -9999.0;

/// Returns the natural log-probabilities of the chosen token and of the `top` most likely tokens, sorted by
/// probability, then by id; `logits` is `[V]`.
pub(super) fn logprobs(logits: &[f32], chosen: u32, top: usize) -> TokenLogprobs {
    let max = logits.iter().copied().filter(|logit| !logit.is_nan()).fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).filter(|part| !part.is_nan()).sum();
    let total = f64::from(max) + sum.ln();
    let logprob = |logit: f32| {
        let value = (f64::from(logit) - total) as f32;
        if value.is_finite() { value } else { LEAST }
    };
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let likelier = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let top = top.min(ids.len());
    if top > 0 && top < ids.len() {
        ids.select_nth_unstable_by(top - 1, likelier);
    }
    ids.truncate(top);
    ids.sort_unstable_by(likelier);
    TokenLogprobs {
        logprob: logits.get(chosen as usize).map_or(LEAST, |logit| logprob(*logit)),
        top: ids.into_iter().map(|id| (id, logprob(logits[id as usize]))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logprobs_are_the_logarithm_of_the_softmax() {
        let logits = [0.0_f32, 2.0_f32.ln(), 5.0_f32.ln(), f32::NEG_INFINITY, 2.0_f32.ln()];
        let found = logprobs(&logits, 1, 3);
        let close =
            |found: f32, expected: f64| assert!((f64::from(found) - expected).abs() < 1e-6, "{found} {expected}");
        close(found.logprob, 0.2_f64.ln());
        let ids: Vec<u32> = found.top.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, [2, 1, 4], "of equal ones the lower id first");
        close(found.top[0].1, 0.5_f64.ln());
        assert_eq!(logprobs(&logits, 3, 0), TokenLogprobs { logprob: LEAST, top: Vec::new() });
        assert_eq!(logprobs(&logits, 0, 9).top.len(), 5);
        let far: f64 = logprobs(&[1000.0, 1000.0], 0, 2).top.iter().map(|(_, value)| f64::from(*value).exp()).sum();
        assert!((far - 1.0).abs() < 1e-6);
    }
}
