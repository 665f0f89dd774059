//! Where a string may end: the first quote or backslash, eight bytes at a time.
//!
//! Answers hold strings of megabytes (routed experts), bodies long prompts; looking at single bytes would take as many
//! milliseconds.

const ONES: u64 = u64::from_le_bytes([1; 8]);
const HIGH: u64 = u64::from_le_bytes([0x80; 8]);

/// The first `"` or `\`.
pub(super) fn quote_or_backslash(bytes: &[u8]) -> Option<usize> {
    let (words, tail) = bytes.as_chunks::<8>();
    for (index, word) in words.iter().enumerate() {
        let word = u64::from_le_bytes(*word);
        let hit = zero_bytes(word ^ (ONES * u64::from(b'"'))) | zero_bytes(word ^ (ONES * u64::from(b'\\')));
        if hit != 0 {
            return Some(index * 8 + hit.trailing_zeros() as usize / 8);
        }
    }
    let start = words.len() * 8;
    tail.iter().position(|byte| matches!(byte, b'"' | b'\\')).map(|at| start + at)
}

/// The high bit of each byte that is zero. Above the first such byte there may be false ones, which nobody looks at.
fn zero_bytes(word: u64) -> u64 {
    word.wrapping_sub(ONES) & !word & HIGH
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn finds_what_a_plain_search_finds(
            bytes in proptest::collection::vec(prop_oneof![8 => any::<u8>(), 1 => Just(b'"'), 1 => Just(b'\\')], 0..40)
        ) {
            let plain = bytes.iter().position(|byte| matches!(byte, b'"' | b'\\'));
            prop_assert_eq!(quote_or_backslash(&bytes), plain);
        }
    }
}
