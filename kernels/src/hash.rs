//! A hash of numbers by which ranks detect that they disagree.

/// One step of an order-dependent hash of words.
pub fn mix(hash: u64, word: u64) -> u64 {
    (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}
