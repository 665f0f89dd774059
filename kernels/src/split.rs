//! Which rows of a batch go to which rank: contiguous parts, or parts of a shuffled order.

use crate::argsort::RankOrder;
use crate::error::{KernelError, check_below, check_count, check_len};
use crate::hash::mix;

/// The rows of n tokens over P ranks. Rank p has the positions `offsets[p]..offsets[p + 1]`; position i is token
/// `permutation[i]`, or token i without a permutation. Always valid: offsets ascend from 0 to n, and every token has
/// exactly one position.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowSplit<'a> {
    permutation: Option<&'a [u32]>,
    offsets: &'a [u32],
}

impl<'a> RowSplit<'a> {
    /// Contiguous parts, for plain collectives. `offsets` is `[P + 1]`.
    ///
    /// # Errors
    /// Offsets that do not ascend from 0.
    pub fn contiguous(offsets: &'a [u32]) -> Result<Self, KernelError> {
        check_offsets(offsets)?;
        Ok(Self { permutation: None, offsets })
    }

    /// Parts of a shuffled order from elsewhere. `permutation` is `[n]`, `offsets` `[P + 1]`; `seen` is scratch.
    ///
    /// # Errors
    /// Offsets that do not ascend from 0 to n, or a permutation with a token out of range or twice.
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

    /// `[n]`, unless the order is that of the tokens.
    pub fn permutation(&self) -> Option<&'a [u32]> {
        self.permutation
    }

    /// Positions of a rank. Panics if there is no such rank.
    pub fn positions(&self, rank: usize) -> std::ops::Range<usize> {
        self.offsets[rank] as usize..self.offsets[rank + 1] as usize
    }

    /// The token at a position. Panics if out of range.
    pub fn token(&self, position: usize) -> usize {
        match self.permutation {
            Some(permutation) => permutation[position] as usize,
            None => position,
        }
    }

    /// A digest that is almost certainly equal on two ranks only if their splits are, by which ranks detect that they
    /// disagree.
    pub fn digest(&self) -> u64 {
        let offsets = self.offsets.iter().fold(self.offsets.len() as u64, |hash, &word| mix(hash, u64::from(word)));
        let Some(permutation) = self.permutation else { return offsets };
        // Four chains, since a single one would wait for each multiplication.
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
    /// An argsort's order is always valid. One that was never filled has no ranks, and every collective rejects it.
    fn from(order: &'a RankOrder) -> Self {
        let offsets = if order.offsets().is_empty() { &[0][..] } else { order.offsets() };
        Self { permutation: Some(order.permutation()), offsets }
    }
}

/// `[P + 1]` offsets of even parts: the first n mod P ranks have one more row, like `torch.tensor_split`.
///
/// # Errors
/// More tokens than 32 bits can count, or no ranks.
pub fn even_offsets(tokens: usize, ranks: usize) -> Result<Vec<u32>, KernelError> {
    check_count(tokens)?;
    if ranks == 0 {
        return Err(KernelError::NoRanks);
    }
    Ok((0..=ranks).map(|rank| even_part(tokens, ranks, rank)).collect())
}

/// The first token of a rank's even part, consistent with [`even_offsets`]; the number of tokens for rank P.
pub fn even_part(tokens: usize, ranks: usize, rank: usize) -> u32 {
    (rank * (tokens / ranks) + rank.min(tokens % ranks)) as u32
}

/// Scratch space for finding a repeated token in a permutation; need not be cleared between calls.
#[derive(Debug, Default)]
pub struct SeenTokens {
    /// The last call that saw each token.
    stamps: Vec<u32>,
    call: u32,
}

impl SeenTokens {
    /// Scratch for up to `tokens` tokens without further allocation.
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
