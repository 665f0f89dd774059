//! The angles of the rotary embedding, as far as sequences have reached.

/// Positions by which the table grows.
const CHUNK_POSITIONS: usize = 256;

/// Cosines and sines, `[positions, head_dim / 2]`.
pub(super) struct RotaryTable {
    /// `[head_dim / 2]`
    frequencies: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RotaryTable {
    pub(super) fn new(head_dim: usize, theta: f64) -> Self {
        let frequency = |i: usize| theta.powf(-(2.0 * i as f64) / head_dim as f64) as f32;
        Self { frequencies: (0..head_dim / 2).map(frequency).collect(), cos: Vec::new(), sin: Vec::new() }
    }

    /// Makes the angles of all positions below `positions` available.
    pub(super) fn grow(&mut self, positions: usize) {
        let half = self.frequencies.len();
        let have = self.cos.len() / half;
        if have >= positions {
            return;
        }
        for position in have..positions.next_multiple_of(CHUNK_POSITIONS) {
            for frequency in &self.frequencies {
                // The product is rounded to f32, as the checkpoints were trained.
                let angle = f64::from(position as f32 * frequency);
                self.cos.push(angle.cos() as f32);
                self.sin.push(angle.sin() as f32);
            }
        }
    }

    /// `(cos, sin)` of one position, each `[head_dim / 2]`.
    pub(super) fn at(&self, position: usize) -> (&[f32], &[f32]) {
        let half = self.frequencies.len();
        (&self.cos[position * half..][..half], &self.sin[position * half..][..half])
    }
}
