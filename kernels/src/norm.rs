//! RMSNorm with a fixed order of additions, so that CPU and GPU results are bit-identical.

/// Number of accumulators for a row's sum of squares: 256 GPU threads with eight adjacent columns (16 bytes of bf16)
/// each.
pub const NORM_LANES: usize = 2048;

/// Returns `1 / sqrt(mean of squares + epsilon)` of a row of H values.
///
/// Every step is a single f32 operation rounded to nearest, without fused multiply-add:
/// 1. accumulator a adds the squares of the columns a, a + 2048, a + 4096, ..., in this order, starting from 0;
/// 2. adjacent ones are folded: for s = 1, 2, 4, ..., 1024: accumulator i += accumulator i + s, for each i that 2s
///    divides;
/// 3. `1 / sqrt(accumulator 0 / H + epsilon)`, with the rounded square root and the rounded division.
#[inline(always)]
pub fn inverse_rms(row: &[f32], epsilon: f32) -> f32 {
    let mut lanes = [0.0f32; NORM_LANES];
    for chunk in row.chunks(NORM_LANES) {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += value * value;
        }
    }
    // Step 2 in place and compacted: after each pass the accumulators are contiguous. Accumulators past the last column
    // are zero and add nothing.
    let mut width = row.len().next_power_of_two().min(NORM_LANES);
    while width > 1 {
        width /= 2;
        for i in 0..width {
            lanes[i] = lanes[2 * i] + lanes[2 * i + 1];
        }
    }
    1.0 / (lanes[0] / row.len() as f32 + epsilon).sqrt()
}
