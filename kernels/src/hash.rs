//! A hash over numbers that ranks compare to detect disagreement.

/// Computes one step of an order-dependent hash of words.
pub fn mix(hash: u64, word: u64) -> u64 {
    (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}
