//! The score of a tokenized prompt with T.

use semmoe_tables::{Score, Tables, TokenId};

/// Sums the rows of T over `ids`. Ids outside the vocabulary, and every id when the tables are for attention TP, have no row
/// and count nowhere.
pub fn score(tables: &Tables, ids: &[u32]) -> Score {
    Score::of_rows(usize::from(tables.dp_ranks()), ids.iter().filter_map(|&id| tables.token_row(TokenId::new(id))))
}
