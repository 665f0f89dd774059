//! Files in the three formats.

use semmoe_tables::{Profile, Tables, TokenId, Trace};

/// Arbitrary bytes are refused with a reason, or can be read completely.
pub fn files(data: &[u8]) {
    if let Ok(tables) = Tables::from_bytes(data.to_vec()) {
        for token in 0..tables.model().vocab_size {
            let _ = tables.token_row(TokenId::new(token));
        }
    }
    if let Ok(trace) = Trace::from_bytes(data.to_vec()) {
        assert_eq!(trace.iter().map(|request| request.token_ids().len()).sum::<usize>(), trace.tokens());
    }
    let _ = Profile::from_bytes(data.to_vec());
}
