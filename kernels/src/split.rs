//! Splits a batch's rows over ranks: into contiguous parts, or parts of a shuffled order.

use crate::argsort::RankOrder;
use crate::error::{KernelError, check_below, check_count, check_len};
use crate::hash::mix;

/// A split of n tokens' rows over P ranks. Rank p has the positions `offsets[p]..offsets[p + 1]`; position i is token
/// `permutation[i]`, or token i without a permutation. Always valid: offsets ascend from 0 to n, and every token has
/// exactly one position.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowSplit<'a> {
    permutation: Option<&'a [u32]>,
    offsets: &'a [u32],
}

impl<'a> RowSplit<'a> {
    /// Creates a split into contiguous parts, for plain collectives. `offsets` is `[P + 1]`.
    ///
    /// # Errors
    /// If the offsets do not ascend from 0.
    pub fn contiguous(offsets: &'a [u32]) -> Result<Self, KernelError> {
        check_offsets(offsets)?;
        Ok(Self { permutation: None, offsets })
    }

    /// Creates a split from a given shuffled order. `permutation` is `[n]`, `offsets` is `[P + 1]`; `seen` is scratch.
    ///
    /// # Errors
    /// If the offsets do not ascend from 0 to n, or the permutation has a token that is out of range or duplicate.
    pub fn shuffled(permutation: &'a [u32], offsets: &'a [u32], seen: &mut SeenTokens) -> Result<Self, KernelError> {
        check_offsets(offsets)?;
        check_len("permutation", permutation.len(), offsets.last().map_or(0, |&end| end as usize))?;
        seen.check(permutation)?;
        Ok(Self { permutation: Some(permutation), offsets })
    }

    /// P
    pub fn ranks(&self) -> usize {
        self.offsets.len() - 1
    }

    /// n
    pub fn tokens(&self) -> usize {
        self.offsets[self.ranks()] as usize
    }

    /// `[P + 1]`
    pub fn offsets(&self) -> &'a [u32] {
        self.offsets
    }

    /// Returns the permutation, `[n]`; `None` if tokens keep their order.
    pub fn permutation(&self) -> Option<&'a [u32]> {
        self.permutation
    }

    /// Returns a rank's positions. Panics if there is no such rank.
    pub fn positions(&self, rank: usize) -> std::ops::Range<usize> {
        self.offsets[rank] as usize..self.offsets[rank + 1] as usize
    }

    /// Returns the token at a position. Panics if out of range.
    pub fn token(&self, position: usize) -> usize {
        match self.permutation {
            Some(permutation) => permutation[position] as usize,
            None => position,
        }
    }

    /// Returns a digest that ranks compare to detect that their splits differ: different splits almost certainly have
    /// different digests.
    pub fn digest(&self) -> u64 {
        let offsets = self.offsets.iter().fold(self.offsets.len() as u64, |hash, &word| mix(hash, u64::from(word)));
        let Some(permutation) = self.permutation else { return offsets };
        // Four chains, because a single one would have to wait for each multiplication.
        let mut chains = [offsets, !offsets, offsets.rotate_left(17), offsets.rotate_left(41)];
        let (fours, rest) = permutation.as_chunks::<4>();
        for four in fours {
            for (chain, &word) in chains.iter_mut().zip(four) {
                *chain = mix(*chain, u64::from(word));
            }
        }
        let rest = rest.iter().fold(1, |hash, &word| mix(hash, u64::from(word)));
        chains.iter().fold(rest, |hash, &chain| mix(hash, chain))
    }
}

impl<'a> From<&'a RankOrder> for RowSplit<'a> {
    /// An argsort's order is always valid. An order that was never filled has no ranks, and every collective rejects
    /// it.
    fn from(order: &'a RankOrder) -> Self {
        let offsets = if order.offsets().is_empty() { &[0][..] } else { order.offsets() };
        Self { permutation: Some(order.permutation()), offsets }
    }
}

/// Returns `[P + 1]` offsets of even parts: the first n mod P ranks have one more row, as in `torch.tensor_split`.
///
/// # Errors
/// If there are no ranks, or more tokens than 32 bits can count.
pub fn even_offsets(tokens: usize, ranks: usize) -> Result<Vec<u32>, KernelError> {
    check_count(tokens)?;
    if ranks == 0 {
        return Err(KernelError::NoRanks);
    }
    Ok((0..=ranks).map(|rank| even_part(tokens, ranks, rank)).collect())
}

/// Returns the first token of a rank's even part, consistent with [`even_offsets`]; for rank P, the number of tokens.
pub fn even_part(tokens: usize, ranks: usize, rank: usize) -> u32 {
    (rank * (tokens / ranks) + rank.min(tokens % ranks)) as u32
}

/// Scratch space for detecting duplicate tokens in a permutation; need not be cleared between calls.
#[derive(Debug, Default)]
pub struct SeenTokens {
    /// The last call that saw each token.
    stamps: Vec<u32>,
    call: u32,
}

impl SeenTokens {
    /// Allocates scratch for up to `tokens` tokens.
    pub fn with_capacity(tokens: usize) -> Self {
        Self { stamps: vec![0; tokens], call: 0 }
    }

    fn check(&mut self, permutation: &[u32]) -> Result<(), KernelError> {
        check_count(permutation.len())?;
        if self.stamps.len() < permutation.len() {
            self.stamps.resize(permutation.len(), 0);
        }
        self.call = self.call.wrapping_add(1);
        if self.call == 0 {
            self.stamps.fill(0);
            self.call = 1;
        }
        let bound = permutation.len();
        for (index, &token) in permutation.iter().enumerate() {
            let found = token as usize;
            check_below("token at position", index, found, bound)?;
            if self.stamps[found] == self.call {
                return Err(KernelError::Twice { index, token: found });
            }
            self.stamps[found] = self.call;
        }
        Ok(())
    }
}

fn check_offsets(offsets: &[u32]) -> Result<(), KernelError> {
    let [first, _, ..] = offsets else { return Err(KernelError::NoRanks) };
    check_below("offset", 0, *first as usize, 1)?;
    match offsets.windows(2).position(|pair| pair[0] > pair[1]) {
        None => Ok(()),
        Some(index) => {
            Err(KernelError::Descending { index: index + 1, found: offsets[index + 1], before: offsets[index] })
        }
    }
}
