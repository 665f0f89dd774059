//! Experts compressed to a sparse residual on a shared expert (HybridEP, section IV-B: SREncode and SRDecode).
//!
//! The shared expert is the mean of all experts. Of each expert's difference from it, the k weights of the largest
//! magnitude are kept, as f16. Choices that the paper leaves open:
//!
//! - the mean is summed in f32 in the order of the experts, divided in f32, and rounded to f16;
//! - the residual is f32(w) - f32(S); among equal magnitudes the lowest index is kept; indices ascend;
//! - decoded weights are f16(f32(S) + f32(value)) where a value was kept, and S elsewhere;
//! - k is the largest number whose values and indices take at most 1 / ratio of the expert's bytes.

use half::f16;

/// Bytes of an index: 2 within a block of 65,536 weights, 4 within the whole expert.
pub const INDEX_BYTES: [usize; 2] = [2, 4];

/// k: the number of values kept of `weights` f16 weights.
#[must_use]
pub fn kept(weights: usize, ratio: usize, index_bytes: usize) -> usize {
    weights * size_of::<f16>() / (ratio * (size_of::<f16>() + index_bytes))
}

/// The mean of a layer's experts, which must have equal lengths.
#[must_use]
pub fn mean(experts: &[&[f16]]) -> Vec<f16> {
    let count = experts.len() as f32;
    let weights = 0..experts.first().map_or(0, |expert| expert.len());
    let mean = |at: usize| f16::from_f32(experts.iter().map(|expert| expert[at].to_f32()).sum::<f32>() / count);
    weights.map(mean).collect()
}

/// Indices, ascending, of the `kept` weights that differ most from the shared expert's, and the differences.
#[must_use]
pub fn encode(expert: &[f16], shared: &[f16], kept: usize) -> Vec<(usize, f16)> {
    let residual = |at: usize| expert[at].to_f32() - shared[at].to_f32();
    let mut order: Vec<usize> = (0..expert.len()).collect();
    // A stable sort keeps the lowest index first among equal magnitudes.
    order.sort_by(|&a, &b| residual(b).abs().total_cmp(&residual(a).abs()));
    order.truncate(kept);
    order.sort_unstable();
    order.into_iter().map(|at| (at, f16::from_f32(residual(at)))).collect()
}

/// The decompressed expert: the residual added to the shared expert.
#[must_use]
pub fn decode(residual: &[(usize, f16)], shared: &[f16]) -> Vec<f16> {
    let mut expert = shared.to_vec();
    for &(at, value) in residual {
        expert[at] = f16::from_f32(shared[at].to_f32() + value.to_f32());
    }
    expert
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The weights that `sr_golden.py` uses.
    fn golden_weights(experts: usize, weights: usize, step: usize) -> Vec<Vec<f16>> {
        let value = |e: usize, i: usize| {
            let count = (i * 7919 + e * 104_729 + i / 13 * e * 31) % step;
            f16::from_f64((count as f64 - (step / 2) as f64) / 512.0)
        };
        (0..experts).map(|e| (0..weights).map(|i| value(e, i)).collect()).collect()
    }

    #[test]
    fn answers_are_those_of_the_reference_program() {
        let bits = |values: &[f16]| values.iter().map(|value| usize::from(value.to_bits())).collect::<Vec<_>>();
        for line in include_str!("sr.golden").lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            let list = |at: usize| fields[at].split(',').map(|word| word.parse().unwrap()).collect::<Vec<usize>>();
            let [experts, weights, ratio, index, step] = [0, 1, 2, 3, 4].map(|at| fields[at].parse().unwrap());
            assert!(INDEX_BYTES.contains(&index));
            let all = golden_weights(experts, weights, step);
            let shared = mean(&all.iter().map(Vec::as_slice).collect::<Vec<_>>());
            let residual = encode(&all[1], &shared, kept(weights, ratio, index));
            let (places, values): (Vec<usize>, Vec<f16>) = residual.iter().copied().unzip();
            assert_eq!((places, bits(&values)), (list(5), list(6)), "{weights} weights, ratio {ratio}");
            if fields.len() > 7 {
                assert_eq!((bits(&shared), bits(&decode(&residual, &shared))), (list(7), list(8)));
            }
        }
    }

    #[test]
    fn an_expert_of_qwen3_keeps_as_many_values_as_its_bytes_allow() {
        // 3 x 4096 x 1536 weights at a ratio of 50: 754,974 bytes.
        assert_eq!(INDEX_BYTES.map(|index| kept(18_874_368, 50, index)), [188_743, 125_829]);
    }
}
