//! Scores a tokenized prompt with T.

use half::f16;
use semmoe_tables::{Score, Tables, TokenId};

use crate::half_rows::{HalfRows, ROWS_PER_BLOCK};

/// Fixed-point representation of a share of 1. Every f16 from 0 to 1 is a multiple of 2^-24, so nothing is rounded.
const ONE: f64 = (1 << 24) as f64;

/// T prepared for summing: the rows of [`Tables::token_row`] in half precision (2 bytes per share) if the processor can
/// sum them, otherwise in fixed point (4 bytes).
///
/// Produces the same result as [`Score::of_rows`], bit for bit, but several times faster: integer sums are exact and
/// therefore independent of the order of tokens.
#[derive(Debug)]
pub struct Scorer {
    ranks: usize,
    /// Rows in half precision; used instead of `rows` if present.
    halves: Option<HalfRows>,
    /// The rows of T, [V, ranks] shares in units of 2^-24.
    rows: Vec<u32>,
    /// One bit per row, set if the row prefers some rank.
    known: Vec<u64>,
}

impl Scorer {
    /// Creates a scorer from tables for attention DP. Tables for attention TP have no rows, so every score is empty.
    pub fn new(tables: &Tables) -> Self {
        let rows = (0..tables.model().vocab_size).filter_map(|token| tables.token_row(TokenId::new(token)));
        let ranks = usize::from(tables.dp_ranks());
        Self::with(ranks, HalfRows::new(ranks), rows)
    }

    /// Creates a scorer from T itself: [V, ranks] shares from 0 to 1.
    pub fn from_rows(ranks: u16, shares: &[f16]) -> Self {
        let ranks = usize::from(ranks);
        Self::with(ranks, HalfRows::new(ranks), shares.chunks_exact(ranks.max(1)))
    }

    fn with<'a>(ranks: usize, halves: Option<HalfRows>, shares: impl Iterator<Item = &'a [f16]>) -> Self {
        let mut scorer = Self { ranks, halves, rows: Vec::new(), known: Vec::new() };
        for (token, row) in shares.enumerate() {
            if token % 64 == 0 {
                scorer.known.push(0);
            }
            let differs = row.windows(2).any(|pair| pair[0] != pair[1]);
            scorer.known[token / 64] |= u64::from(differs) << (token % 64);
            match &mut scorer.halves {
                Some(halves) => halves.shares.extend_from_slice(row),
                None => scorer.rows.extend(row.iter().map(|share| (f64::from(*share) * ONE) as u32)),
            }
        }
        if let Some(halves) = &mut scorer.halves {
            halves.shares.shrink_to_fit();
        }
        scorer.rows.shrink_to_fit();
        scorer
    }

    /// Sums the rows of T over `ids` (Sem-MoE, section 4.2). Ids outside the vocabulary are ignored.
    pub fn score(&self, ids: &[u32]) -> Score {
        let mut sums = vec![0; self.ranks];
        let mut score = Score { per_rank: Vec::new(), tokens: 0, known: 0 };
        match &self.halves {
            Some(halves) => halves.add(ids, &self.known, &mut sums, &mut score),
            None => self.add_fixed(ids, &mut sums, &mut score),
        }
        score.per_rank = sums.into_iter().map(|sum| sum as f64 / ONE).collect();
        score
    }

    fn add_fixed(&self, ids: &[u32], sums: &mut [u64], score: &mut Score) {
        match self.ranks {
            0 => {}
            1 => self.add::<1>(ids, sums, score),
            2 => self.add::<2>(ids, sums, score),
            4 => self.add::<4>(ids, sums, score),
            8 => self.add::<8>(ids, sums, score),
            16 => self.add::<16>(ids, sums, score),
            32 => self.add::<32>(ids, sums, score),
            64 => self.add::<64>(ids, sums, score),
            _ => self.add_any(ids, sums, score),
        }
    }

    /// Adds rows; with the number of ranks known at compile time, adding a row takes a few vector additions.
    fn add<const RANKS: usize>(&self, ids: &[u32], sums: &mut [u64], score: &mut Score) {
        let (rows, _) = self.rows.as_chunks::<RANKS>();
        for ids in ids.chunks(ROWS_PER_BLOCK) {
            let mut block = [0u32; RANKS];
            for &id in ids {
                let Some(row) = rows.get(id as usize) else { continue };
                self.count(id, score);
                block.iter_mut().zip(row).for_each(|(sum, share)| *sum += share);
            }
            sums.iter_mut().zip(block).for_each(|(sum, block)| *sum += u64::from(block));
        }
    }

    fn add_any(&self, ids: &[u32], sums: &mut [u64], score: &mut Score) {
        for &id in ids {
            let start = id as usize * self.ranks;
            let Some(row) = self.rows.get(start..start + self.ranks) else { continue };
            self.count(id, score);
            sums.iter_mut().zip(row).for_each(|(sum, &share)| *sum += u64::from(share));
        }
    }

    fn count(&self, id: u32, score: &mut Score) {
        score.tokens += 1;
        score.known += self.known[id as usize / 64] >> (id % 64) & 1;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shares(ranks: u16) -> impl Strategy<Value = Vec<f16>> {
        let share = prop_oneof![
            (0u16..=0x3c00).prop_map(f16::from_bits),
            Just(f16::from_bits(0x8000)),
            Just(f16::ONE),
            Just(f16::from_f64(0.25)),
        ];
        prop::collection::vec(share, 70 * usize::from(ranks))
    }

    proptest! {
        #[test]
        fn equals_the_rule_bit_for_bit(
            (ranks, shares) in prop_oneof![1u16..10, Just(16), Just(32), Just(64)]
                .prop_flat_map(|ranks| (Just(ranks), shares(ranks))),
            ids in prop::collection::vec(0u32..75, 0..900),
        ) {
            let row = |&id: &u32| shares.chunks_exact(usize::from(ranks)).nth(id as usize);
            let expected = Score::of_rows(usize::from(ranks), ids.iter().filter_map(row));
            let fixed = Scorer::with(usize::from(ranks), None, shares.chunks_exact(usize::from(ranks)));
            prop_assert_eq!(fixed.score(&ids), expected.clone());
            prop_assert_eq!(Scorer::from_rows(ranks, &shares).score(&ids), expected);
        }
    }

    #[test]
    fn the_largest_shares_do_not_overflow() {
        let scorer = Scorer::from_rows(8, &[f16::ONE; 8]);
        let score = scorer.score(&vec![0; 1 << 20]);
        assert_eq!(score.per_rank, [f64::from(1 << 20); 8]);
        assert_eq!((score.tokens, score.known), (1 << 20, 0));
    }

    #[test]
    fn no_id_is_beyond_the_table_whatever_its_value() {
        for ranks in [1, 3, 8, 64] {
            let scorer = Scorer::from_rows(ranks, &vec![f16::ONE; usize::from(ranks) * 3]);
            assert_eq!(scorer.score(&[3, u32::MAX, 2, 1 << 31]).tokens, 1);
        }
    }
}
