//! Element-wise functions and row reductions, compiled for every instruction set.

use super::isa::by_isa;

/// Number of lanes in every reduction: element i is added to lane i % LANES, then the lanes are summed in order.
const LANES: usize = 16;

/// Sums the lanes in a fixed order.
#[inline(always)]
fn sum_lanes(lanes: [f32; LANES]) -> f32 {
    lanes.iter().sum()
}

/// Sums the squares of a row; an element's absolute position determines its lane.
#[inline(always)]
fn sum_of_squares(row: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (whole, rest) = row.as_chunks::<LANES>();
    for chunk in whole {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += value * value;
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane += value * value;
    }
    sum_lanes(lanes)
}

/// Computes e^x to within 2 units in the last place, using the Cephes polynomial. Returns 0 below -87, where the result
/// is negligible.
#[inline(always)]
fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 is split into two parts to preserve the low bits of x - n ln 2.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding this constant rounds a value to an integer, which ends up in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.0, 88.0);
    let shifted = clamped * LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p * r + c;
    }
    let p = p * r * r + r + 1.0;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
    if x < -87.0 { 0.0 } else { p * power }
}

/// Rotates a point by an angle.
#[inline(always)]
fn rotate_point(a: &mut f32, b: &mut f32, cos: f32, sin: f32) {
    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
}

by_isa! {
    /// `out[i] = x[i] / sqrt(mean(x[i]^2) + eps) * weight`; rows of `weight.len()` elements.
    pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let width = weight.len();
        for (row, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            let scale = 1.0 / (sum_of_squares(row) / width as f32 + eps).sqrt();
            for ((out, x), weight) in out.iter_mut().zip(row).zip(weight) {
                *out = x * scale * weight;
            }
        }
    }

    /// `out += x`
    pub fn add(x: &[f32], out: &mut [f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out += x;
        }
    }

    /// `out += x * factor`
    pub fn add_scaled(x: &[f32], factor: f32, out: &mut [f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out += x * factor;
        }
    }

    /// Adds `row` to every row of `out`, whose rows have `row.len()` elements.
    pub fn add_row(row: &[f32], out: &mut [f32]) {
        for out in out.chunks_exact_mut(row.len()) {
            for (out, x) in out.iter_mut().zip(row) {
                *out += x;
            }
        }
    }

    /// Clamps the magnitude of all elements to `most`.
    pub fn clamp(x: &mut [f32], most: f32) {
        for x in x {
            *x = x.clamp(-most, most);
        }
    }

    /// `out = x * factor`
    pub fn scale_to(x: &[f32], factor: f32, out: &mut [f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = x * factor;
        }
    }

    /// `out = silu(gate) * up` over rows `[gate | up]` of `2 x width` elements; `out` has rows of `width`.
    pub fn silu_product(gate_up: &[f32], width: usize, out: &mut [f32]) {
        for (row, out) in gate_up.chunks_exact(2 * width).zip(out.chunks_exact_mut(width)) {
            let (gate, up) = row.split_at(width);
            for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
                *out = gate / (1.0 + exp(-gate)) * up;
            }
        }
    }

    /// Rotates one head in place by the angles of one position, pairing elements of the first half with those of the
    /// second.
    pub fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
        let (first, second) = head.split_at_mut(cos.len());
        for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
            rotate_point(a, b, *cos, *sin);
        }
    }

    /// Rotates one head in place by the angles of one position, pairing each even element with the one that follows it.
    pub fn rotate_pairs(head: &mut [f32], cos: &[f32], sin: &[f32]) {
        let (pairs, _) = head.as_chunks_mut::<2>();
        for (([a, b], cos), sin) in pairs.iter_mut().zip(cos).zip(sin) {
            rotate_point(a, b, *cos, *sin);
        }
    }

    /// Replaces the first `len` scores with `exp(scale * (score - max))` and all later ones with 0, and returns the
    /// sum. The length of the row must be a multiple of 16.
    pub fn softmax(scores: &mut [f32], len: usize, scale: f32) -> f32 {
        scores[len..].fill(f32::NEG_INFINITY);
        let (chunks, _) = scores.as_chunks_mut::<LANES>();
        let mut lanes = [f32::NEG_INFINITY; LANES];
        for chunk in chunks.iter() {
            for (lane, score) in lanes.iter_mut().zip(chunk) {
                *lane = if *score > *lane { *score } else { *lane };
            }
        }
        let max = lanes.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
        let mut lanes = [0.0f32; LANES];
        for chunk in chunks.iter_mut() {
            for (lane, score) in lanes.iter_mut().zip(chunk) {
                *score = exp((*score - max) * scale);
                *lane += *score;
            }
        }
        sum_lanes(lanes)
    }

    /// Returns the index of the largest element, the first one on ties, or `None` if all are NaN.
    pub fn first_largest(values: &[f32]) -> Option<usize> {
        // Comparisons with NaN are false, so NaN is never selected.
        let larger = |most: f32, value: f32| if value > most { value } else { most };
        let (chunks, rest) = values.as_chunks::<LANES>();
        let mut lanes = [f32::NEG_INFINITY; LANES];
        for chunk in chunks {
            for (lane, value) in lanes.iter_mut().zip(chunk) {
                *lane = larger(*lane, *value);
            }
        }
        let most = lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |most, value| larger(most, *value));
        let is_most = |value: &f32| *value == most;
        let holds = |chunk: &[f32; LANES]| chunk.iter().fold(false, |any, value| any | is_most(value));
        let chunk = chunks.iter().position(holds).unwrap_or(chunks.len());
        values[chunk * LANES..].iter().position(is_most).map(|at| chunk * LANES + at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_the_largest_is_found_and_no_nan() {
        let plain = |values: &[f32]| {
            let better = |best: Option<usize>, i: usize| match best {
                _ if values[i].is_nan() => best,
                Some(best) if values[best] >= values[i] => Some(best),
                _ => Some(i),
            };
            (0..values.len()).fold(None, better)
        };
        let mut random = fastrand::Rng::with_seed(3);
        for len in (0..70).chain([1000, 10_240]) {
            for kinds in [2, 5, 1000] {
                let value = |random: &mut fastrand::Rng| match random.u32(0..kinds) {
                    0 => f32::NAN,
                    1 => f32::NEG_INFINITY,
                    n => n as f32 - 3.0,
                };
                let values: Vec<f32> = (0..len).map(|_| value(&mut random)).collect();
                assert_eq!(first_largest(&values), plain(&values), "{values:?}");
            }
        }
        assert_eq!(first_largest(&[f32::NAN, f32::INFINITY, f32::INFINITY]), Some(1));
        assert_eq!(first_largest(&[0.0, -0.0]), Some(0));
        assert_eq!(first_largest(&[-0.0, 0.0]), Some(0));
    }

    #[test]
    fn exp_is_close_to_the_library_everywhere() {
        let mut worst = 0.0f32;
        for i in -870_000..880_000 {
            let x = i as f32 * 1e-4;
            worst = worst.max((exp(x) - x.exp()).abs() / x.exp());
        }
        assert!(worst < 3e-7, "{worst}");
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(1e30).is_finite());
    }

    #[test]
    fn softmax_ignores_what_is_past_its_length() {
        let mut row: Vec<f32> = (0..48).map(|i| (i % 7) as f32).collect();
        let mut other = row.clone();
        other[20..].fill(1e9);
        other.truncate(32);
        let (a, b) = (softmax(&mut row, 20, 0.5), softmax(&mut other, 20, 0.5));
        assert_eq!(a.to_bits(), b.to_bits());
        assert_eq!(row[..32], other[..]);
        let expected: f32 = (0..20).map(|i| (((i % 7) as f32 - 6.0) * 0.5).exp()).sum();
        assert!((a - expected).abs() < 1e-5);
        assert!(row[20..].iter().all(|&p| p == 0.0));
    }

    #[test]
    fn norm_rotation_and_silu_are_what_their_formulas_say() {
        let x: Vec<f32> = (0..40).map(|i| i as f32 / 8.0 - 2.0).collect();
        let mut out = vec![0.0; 40];
        rms_norm(&x, &[2.0; 20], 1e-6, &mut out);
        let mean = x[20..].iter().map(|v| v * v).sum::<f32>() / 20.0;
        assert!((out[39] - 2.0 * x[39] / mean.sqrt()).abs() < 1e-5);

        let mut head = [1.0, 2.0, 3.0, 4.0];
        rotate(&mut head, &[0.0, 1.0], &[1.0, 0.0]);
        assert_eq!(head, [-3.0, 2.0, 1.0, 4.0]);

        let mut out = [0.0; 1];
        silu_product(&[1.5, 4.0], 1, &mut out);
        assert!((out[0] - 1.5 / (1.0 + (-1.5f32).exp()) * 4.0).abs() < 1e-6);
    }
}
