//! A hash of numbers, which ranks compare to detect that they disagree.

/// Computes one step of an order-dependent hash of words.
pub fn mix(hash: u64, word: u64) -> u64 {
    (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}
