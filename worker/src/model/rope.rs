//! Rotary embedding angles for all positions reached so far.

use std::f64::consts::TAU;

use super::compute::{rotate, rotate_pairs};
use super::config::{Rope, RopeLayout, Yarn};

/// The table grows in steps of this many positions.
const CHUNK_POSITIONS: usize = 256;

/// Cosines and sines, `[positions, dim / 2]`.
pub(super) struct RotaryTable {
    layout: RopeLayout,
    /// `[dim / 2]`
    frequencies: Vec<f32>,
    /// Scale factor for cosines and sines.
    magnitude: f64,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RotaryTable {
    /// Creates an empty table for heads in which `dim` elements are rotated.
    pub(super) fn new(dim: usize, rope: &Rope) -> Self {
        let plain = (0..dim / 2).map(|i| rope.theta.powf(-(2.0 * i as f64) / dim as f64));
        let (frequencies, magnitude) = match &rope.yarn {
            None => (plain.map(|frequency| frequency as f32).collect(), 1.0),
            Some(yarn) => {
                let ramp = ramp(dim, rope.theta, yarn);
                let stretched = |(i, f): (usize, f64)| (f / yarn.factor * ramp(i) + f * (1.0 - ramp(i))) as f32;
                (plain.enumerate().map(stretched).collect(), yarn.attention_factor)
            }
        };
        Self { layout: rope.layout, frequencies, magnitude, cos: Vec::new(), sin: Vec::new() }
    }

    /// Extends the table to cover all positions below `positions`.
    pub(super) fn grow(&mut self, positions: usize) {
        let half = self.frequencies.len();
        let have = self.cos.len() / half;
        if have >= positions {
            return;
        }
        for position in have..positions.next_multiple_of(CHUNK_POSITIONS) {
            for frequency in &self.frequencies {
                // The product is rounded to f32 because the checkpoints were trained that way.
                let angle = f64::from(position as f32 * frequency);
                self.cos.push((angle.cos() * self.magnitude) as f32);
                self.sin.push((angle.sin() * self.magnitude) as f32);
            }
        }
    }

    /// Returns the cosines and sines of all positions so far, each `[positions, dim / 2]`.
    #[cfg(feature = "gpu")]
    pub(super) fn all(&self) -> [&[f32]; 2] {
        [&self.cos, &self.sin]
    }

    /// Rotates one whole head for a position that the table covers.
    pub(super) fn rotate(&self, position: usize, head: &mut [f32]) {
        let half = self.frequencies.len();
        let (cos, sin) = (&self.cos[position * half..][..half], &self.sin[position * half..][..half]);
        match self.layout {
            RopeLayout::Halves => rotate(head, cos, sin),
            RopeLayout::Pairs => rotate_pairs(head, cos, sin),
        }
    }
}

/// Returns YaRN's ramp over frequency indices: 0 (left unscaled) up to `low`, 1 (fully divided) from `high` on, linear
/// in between.
fn ramp(dim: usize, theta: f64, yarn: &Yarn) -> impl Fn(usize) -> f64 + use<> {
    // Index of the frequency that completes this many rotations over the original context.
    let index = |rotations: f64| dim as f64 * (yarn.original_positions / (rotations * TAU)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) = (index(yarn.beta_fast), index(yarn.beta_slow));
    if yarn.truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
    if low == high {
        high += 0.001;
    }
    move |i| ((i as f64 - low) / (high - low)).clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_and_halves_are_the_same_rotation_of_other_elements() {
        let rope = |layout| Rope { theta: 100.0, layout, yarn: None };
        let (mut halves, mut pairs) =
            (RotaryTable::new(6, &rope(RopeLayout::Halves)), RotaryTable::new(6, &rope(RopeLayout::Pairs)));
        halves.grow(10);
        pairs.grow(10);
        let mut by_half = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let mut by_pair = [1.0, 4.0, 2.0, 5.0, 3.0, 6.0];
        halves.rotate(7, &mut by_half);
        pairs.rotate(7, &mut by_pair);
        let regrouped = [by_pair[0], by_pair[2], by_pair[4], by_pair[1], by_pair[3], by_pair[5]];
        assert_eq!(by_half, regrouped);
        assert_ne!(by_half[0], 1.0);
    }

    #[test]
    fn yarn_keeps_fast_angles_and_divides_slow_ones() {
        let yarn = Yarn {
            factor: 4.0,
            original_positions: 4096.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: 1.5,
            score_factor: 1.0,
        };
        let rope = |yarn| Rope { theta: 10_000.0, layout: RopeLayout::Halves, yarn };
        let (plain, stretched) = (RotaryTable::new(64, &rope(None)), RotaryTable::new(64, &rope(Some(yarn))));
        let ratio = |i: usize| plain.frequencies[i] / stretched.frequencies[i];
        assert!((ratio(0) - 1.0).abs() < 1e-6 && (ratio(31) - 4.0).abs() < 1e-5);
        assert!((0..31).all(|i| ratio(i) <= ratio(i + 1) + 1e-6), "a ramp");
        assert_eq!(stretched.magnitude, 1.5);
    }
}
