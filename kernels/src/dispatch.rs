//! Plans which token is sent to which rank: once per rank, with all of its experts there (deduplicated sends).

use std::ops::Range;

use crate::error::{KernelError, check_below, check_count, check_len};

/// The rows that one rank sends for its tokens in one layer; reused between calls.
///
/// Rows are ordered by destination rank, then by token; a row's (expert, weight) pairs keep the router's order.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct DispatchPlan {
    tokens: usize,
    /// `[P + 1]` offsets into `row_tokens`
    row_offsets: Vec<u32>,
    /// `[P + 1]` offsets into `experts`
    pair_offsets: Vec<u32>,
    /// `[R]`
    row_tokens: Vec<u32>,
    /// `[R]`
    row_pairs: Vec<u16>,
    /// `[n x k]`
    experts: Vec<u16>,
    /// `[n x k]`
    weights: Vec<f32>,
    cursors: Vec<Cursor>,
}

#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Cursor {
    row: u32,
    pair: u32,
    /// 1 + the last token sent to this rank; 0 if none was sent yet.
    last_token: u32,
}

/// The rows sent to one rank: r rows with m pairs in total.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct RankRows<'a> {
    /// `[r]`: the token of each row, ascending.
    pub tokens: &'a [u32],
    /// `[r]`: number of pairs of each row, at least 1; they sum to m.
    pub pairs: &'a [u16],
    /// `[m]`: logical expert ids, row by row.
    pub experts: &'a [u16],
    /// `[m]`: router weights, row by row.
    pub weights: &'a [f32],
}

impl<'a> RankRows<'a> {
    /// Returns a range of the rows with their pairs. Panics if out of range.
    #[must_use]
    pub fn slice(self, rows: Range<usize>) -> Self {
        let count = |pairs: &[u16]| pairs.iter().map(|&count| usize::from(count)).sum::<usize>();
        let first = count(&self.pairs[..rows.start]);
        let pairs = first..first + count(&self.pairs[rows.clone()]);
        self.cut(rows, pairs)
    }

    fn cut(self, rows: Range<usize>, pairs: Range<usize>) -> Self {
        Self {
            tokens: &self.tokens[rows.clone()],
            pairs: &self.pairs[rows],
            experts: &self.experts[pairs.clone()],
            weights: &self.weights[pairs],
        }
    }
}

impl DispatchPlan {
    /// Plans the sends of n tokens.
    ///
    /// - `experts` `[n, k]`: logical expert ids, each below N; those of one token are distinct
    /// - `weights` `[n, k]`
    /// - `rank_of_expert` `[N]`: the rank that hosts each expert, each below `ranks`
    ///
    /// # Errors
    /// If lengths do not match, or an expert or a rank is out of range; the plan is then unspecified.
    pub fn build(
        &mut self,
        experts: &[u16],
        weights: &[f32],
        top_k: usize,
        rank_of_expert: &[u16],
        ranks: usize,
    ) -> Result<(), KernelError> {
        self.begin(experts, weights, top_k)?;
        for (expert, &rank) in rank_of_expert.iter().enumerate() {
            check_below("rank of expert", expert, rank.into(), ranks)?;
        }
        self.count(experts, top_k, rank_of_expert, ranks)?;
        self.place(experts, weights, top_k, rank_of_expert);
        Ok(())
    }

    /// Plans to send n tokens to every rank with all of their pairs, for experts sliced over all ranks. `experts` and
    /// `weights` are `[n, k]`.
    ///
    /// # Errors
    /// See [`DispatchPlan::build`]; the plan is then unspecified.
    pub fn build_everywhere(
        &mut self,
        experts: &[u16],
        weights: &[f32],
        top_k: usize,
        ranks: usize,
    ) -> Result<(), KernelError> {
        check_count(experts.len().saturating_mul(ranks))?;
        self.begin(experts, weights, top_k)?;
        let pairs = std::iter::repeat_n(top_k as u16, self.tokens);
        self.repeat(pairs, experts, weights, ranks);
        Ok(())
    }

    /// Plans to forward received rows to every rank with all of their pairs. `pairs` is `[n]`, each row's number of
    /// pairs, at least 1; `experts` and `weights` have one element per pair.
    ///
    /// # Errors
    /// If lengths do not match or a row has no pairs; the plan is then unspecified.
    pub fn build_forward(
        &mut self,
        pairs: &[u16],
        experts: &[u16],
        weights: &[f32],
        ranks: usize,
    ) -> Result<(), KernelError> {
        check_count(experts.len().saturating_mul(ranks))?;
        check_len("experts", experts.len(), pairs.iter().map(|&count| usize::from(count)).sum())?;
        check_len("weights", weights.len(), experts.len())?;
        if let Some(index) = pairs.iter().position(|&count| count == 0) {
            return Err(KernelError::NoPairs { row: index });
        }
        self.tokens = pairs.len();
        self.repeat(pairs.iter().copied(), experts, weights, ranks);
        Ok(())
    }

    /// Plans to send all rows to every rank.
    fn repeat(&mut self, of_rows: impl Iterator<Item = u16> + Clone, experts: &[u16], weights: &[f32], ranks: usize) {
        let (tokens, pairs) = (self.tokens as u32, experts.len() as u32);
        self.row_offsets.clear();
        self.row_offsets.extend((0..=ranks as u32).map(|rank| rank * tokens));
        self.pair_offsets.clear();
        self.pair_offsets.extend((0..=ranks as u32).map(|rank| rank * pairs));
        self.row_tokens.clear();
        self.row_pairs.clear();
        self.experts.clear();
        self.weights.clear();
        for _ in 0..ranks {
            self.row_tokens.extend(0..tokens);
            self.row_pairs.extend(of_rows.clone());
            self.experts.extend_from_slice(experts);
            self.weights.extend_from_slice(weights);
        }
    }

    /// Checks the routes and counts the tokens.
    fn begin(&mut self, experts: &[u16], weights: &[f32], top_k: usize) -> Result<(), KernelError> {
        check_count(experts.len())?;
        check_len("weights", weights.len(), experts.len())?;
        // k = 0 is invalid as a divisor, and a row's number of pairs has 16 bits.
        let bound = usize::from(u16::MAX);
        if top_k == 0 {
            return Err(KernelError::NoPairs { row: 0 });
        }
        if top_k > bound {
            return Err(KernelError::OutOfRange { what: "top-k", index: 0, found: top_k, bound: bound + 1 });
        }
        self.tokens = experts.len() / top_k;
        check_len("experts", experts.len(), self.tokens * top_k)
    }

    /// First pass: counts each rank's rows and pairs, then computes offsets.
    fn count(
        &mut self,
        experts: &[u16],
        top_k: usize,
        rank_of_expert: &[u16],
        ranks: usize,
    ) -> Result<(), KernelError> {
        self.cursors.clear();
        self.cursors.resize(ranks, Cursor::default());
        for (index, &expert) in experts.iter().enumerate() {
            check_below("expert", index, expert.into(), rank_of_expert.len())?;
            let token = (index / top_k) as u32 + 1;
            let cursor = &mut self.cursors[usize::from(rank_of_expert[usize::from(expert)])];
            cursor.pair += 1;
            cursor.row += u32::from(cursor.last_token != token);
            cursor.last_token = token;
        }
        let (mut row, mut pair) = (0, 0);
        self.row_offsets.clear();
        self.pair_offsets.clear();
        for cursor in &mut self.cursors {
            self.row_offsets.push(row);
            self.pair_offsets.push(pair);
            (row, pair) = (row + cursor.row, pair + cursor.pair);
            *cursor = Cursor { row: row - cursor.row, pair: pair - cursor.pair, last_token: 0 };
        }
        self.row_offsets.push(row);
        self.pair_offsets.push(pair);
        self.row_tokens.resize(row as usize, 0);
        self.row_pairs.resize(row as usize, 0);
        Ok(())
    }

    /// Second pass: places every pair.
    fn place(&mut self, experts: &[u16], weights: &[f32], top_k: usize, rank_of_expert: &[u16]) {
        self.experts.resize(experts.len(), 0);
        self.weights.resize(experts.len(), 0.0);
        for (index, (&expert, &weight)) in experts.iter().zip(weights).enumerate() {
            let token = (index / top_k) as u32;
            let cursor = &mut self.cursors[usize::from(rank_of_expert[usize::from(expert)])];
            if cursor.last_token != token + 1 {
                cursor.last_token = token + 1;
                self.row_tokens[cursor.row as usize] = token;
                self.row_pairs[cursor.row as usize] = 0;
                cursor.row += 1;
            }
            self.row_pairs[cursor.row as usize - 1] += 1;
            self.experts[cursor.pair as usize] = expert;
            self.weights[cursor.pair as usize] = weight;
            cursor.pair += 1;
        }
    }

    /// P: ranks of the plan.
    pub fn ranks(&self) -> usize {
        self.row_offsets.len().saturating_sub(1)
    }

    /// n: tokens planned.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns the rows sent to a rank. Panics if there is no such rank.
    pub fn rank(&self, rank: usize) -> RankRows<'_> {
        let of_rank = |offsets: &[u32]| offsets[rank] as usize..offsets[rank + 1] as usize;
        let Self { row_tokens: tokens, row_pairs, experts, weights, row_offsets, pair_offsets, .. } = self;
        let all = RankRows { tokens, pairs: row_pairs, experts, weights };
        all.cut(of_rank(row_offsets), of_rank(pair_offsets))
    }
}
