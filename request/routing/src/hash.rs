//! Small deterministic hashes for randomness, keys and token blocks. None of them is secure against an attacker.

/// SplitMix64: a bijection that maps consecutive integers to pseudorandom ones.
pub(crate) fn scramble(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Multiplies to 128 bits and xors the halves.
pub(crate) fn fold(a: u64, b: u64) -> u64 {
    let wide = u128::from(a) * u128::from(b);
    (wide as u64) ^ ((wide >> 64) as u64)
}

/// Hashes arbitrary bytes, such as keys sent by clients.
pub fn hash_key(bytes: &[u8]) -> u64 {
    let mut hash = scramble(bytes.len() as u64);
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        hash = fold(hash ^ u64::from_le_bytes(word), 0xa076_1d64_78bd_642f);
    }
    scramble(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_differ_by_content_and_length() {
        let keys: [&[u8]; 6] = [b"", b"\0", b"a", b"a\0", b"abcdefgh", b"abcdefghi"];
        let mut hashes = keys.map(hash_key).to_vec();
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), keys.len());
        assert_eq!(hash_key(b"session-7"), hash_key(b"session-7"));
    }
}
