//! The one hash of numbers by which ranks find out that they disagree.

/// One step of a hash that depends on the order of its words.
pub fn mix(hash: u64, word: u64) -> u64 {
    (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}
