//! Expert-parallel dispatch and combine: sends every token once to each rank that hosts one of its experts, and returns
//! the sums.

use std::sync::atomic::Ordering::Relaxed;

use semmoe_kernels::{Element, NO_EXPERT, NO_ROW, RoutedTokens, check_below, check_len, mix, sum_rows};
use semmoe_tables::RankId;

use crate::MAX_WORLD;
use crate::call::{Call, Operation};
use crate::communicator::Communicator;
use crate::error::RankError;
use crate::span::{Span, overlap};

/// This rank's tokens and their routes; n may differ between ranks, all other values must be equal.
#[derive(Clone, Copy, Debug)]
pub struct Routes<'a, T> {
    /// The tokens with their experts and weights.
    pub tokens: RoutedTokens<'a, T>,
    /// `[N]`: the rank of each expert.
    pub rank_of_expert: &'a [u32],
    /// k, 1 to 65,535
    pub top_k: usize,
    /// H
    pub hidden: usize,
}

/// The spans in which every rank receives its R rows, at most `capacity`, ordered by source rank, then by the source's
/// tokens.
#[derive(Clone, Copy, Debug)]
pub struct Received<T> {
    /// `[capacity, H]`
    pub rows: Span<T>,
    /// `[capacity]`: the token's index on its source rank.
    pub tokens: Span<u32>,
    /// `[capacity, k]`: the token's experts hosted here, padded with [`NO_EXPERT`].
    pub experts: Span<i32>,
    /// `[capacity, k]`: their weights, padded with 0.
    pub weights: Span<f32>,
}

/// The outputs of a dispatch for the caller.
#[derive(Debug)]
pub struct Dispatch<'a> {
    /// `[P + 1]`: rows from rank p are `source_offsets[p]..source_offsets[p + 1]`.
    pub source_offsets: &'a mut [u32],
    /// `[n, P]`: the row of each token on rank q, or [`NO_ROW`]; combine needs it.
    pub sent_rows: &'a mut [i32],
}

impl Communicator {
    /// Dispatch by pushing, as defined by `dispatch` in `tests/reference`.
    ///
    /// # Errors
    /// If operands do not match (checked before any work), a rank would receive more than `capacity` rows (reported on
    /// all ranks), or a rank left, is late or makes a different call.
    pub fn dispatch<T: Element>(
        &mut self,
        routes: Routes<'_, T>,
        received: Received<T>,
        out: Dispatch<'_>,
    ) -> Result<(), RankError> {
        let (world, rank) = (self.world(), self.rank);
        let counts = self.check_dispatch(&routes, received, &out)?;
        for (word, &count) in self.signals(rank).counts.iter().zip(&counts) {
            word.store(count, Relaxed);
        }
        let mut call = Call::new(Operation::Dispatch, T::DTYPE);
        call.hidden = routes.hidden as u64;
        call.offsets = [received.rows.offset() as u64, received.tokens.offset() as u64];
        call.limits = ((received.tokens.len() as u64) << 16) | routes.top_k as u64;
        call.digest = digest(&routes, received);
        self.enter(&call)?;
        let firsts = self.firsts(received.tokens.len(), out.source_offsets);
        if firsts.is_ok() {
            out.sent_rows.fill(NO_ROW);
        }
        let answer = firsts.map(|mut next| {
            for token in 0..out.sent_rows.len() / world {
                self.send(&routes, received, token, &mut next, &mut out.sent_rows[token * world..][..world]);
            }
        });
        self.exit()?;
        answer
    }

    /// Combine by pulling, as defined by `combine` in `tests/reference`: `out[t]` is the sum of all ranks' results for
    /// the token's rows. `sums` is `[capacity, H]`, `sent_rows` is `[n, P]`, `out` is `[n, H]`.
    ///
    /// # Errors
    /// If operands do not match (checked before any work), or a rank left, is late or makes a different call.
    pub fn combine<T: Element>(
        &mut self,
        sums: Span<T>,
        hidden: usize,
        sent_rows: &[i32],
        out: &mut [T],
    ) -> Result<(), RankError> {
        self.check_alive()?;
        self.check_span("sums", sums)?;
        let world = self.world();
        let tokens = sent_rows.len() / world;
        check_len("sent rows", sent_rows.len(), tokens * world)?;
        check_len("out", out.len(), tokens * hidden)?;
        let bound = sums.len().checked_div(hidden).unwrap_or(usize::MAX).min(i32::MAX as usize);
        for (index, &row) in sent_rows.iter().enumerate() {
            if row != NO_ROW {
                check_below("sent row", index, row as u32 as usize, bound)?;
            }
        }
        let mut call = Call::new(Operation::Combine, T::DTYPE);
        (call.hidden, call.offsets, call.limits) = (hidden as u64, [sums.offset() as u64, 0], (bound as u64) << 16);
        self.enter(&call)?;
        for (sent, to) in sent_rows.chunks_exact(world).zip(out.chunks_exact_mut(hidden.max(1))) {
            let (mut rows, mut found) = ([&[][..]; MAX_WORLD], 0);
            for (peer, &row) in sent.iter().enumerate().filter(|(_, row)| **row != NO_ROW) {
                // SAFETY: the row is below `bound` (checked), so it is within `sums`, which is within the buffer
                // (checked); no rank writes sums between entry and exit.
                rows[found] =
                    unsafe { std::slice::from_raw_parts(self.at(peer, sums).add(row as usize * hidden), hidden) };
                found += 1;
            }
            sum_rows(&rows[..found], to);
        }
        self.exit()
    }

    /// Sends one token, whose experts and ranks must have been checked.
    fn send<T: Element>(
        &self,
        routes: &Routes<'_, T>,
        received: Received<T>,
        token: usize,
        next: &mut [u32; MAX_WORLD],
        sent: &mut [i32],
    ) {
        let (k, hidden) = (routes.top_k, routes.hidden);
        let RoutedTokens { x, experts, weights } = routes.tokens;
        let row = &x[token * hidden..][..hidden];
        let slots = token * k..(token + 1) * k;
        let hosts = slots.clone().filter_map(|slot| {
            let expert = experts[slot];
            (expert != NO_EXPERT).then(|| (slot, routes.rank_of_expert[expert as usize] as usize))
        });
        let mut filled = [0usize; MAX_WORLD];
        for (slot, peer) in hosts {
            if sent[peer] == NO_ROW {
                sent[peer] = next[peer] as i32;
                next[peer] += 1;
                let at = sent[peer] as usize;
                // SAFETY: `at` is below the capacity, because every rank's rows were counted against it; the spans have
                // been checked against the capacity and the buffer. Only this rank writes its tokens' rows, and they
                // are read after the exit.
                unsafe {
                    self.at(peer, received.rows).add(at * hidden).copy_from_nonoverlapping(row.as_ptr(), hidden);
                    self.at(peer, received.tokens).add(at).write(token as u32);
                    for unused in 0..k {
                        self.at(peer, received.experts).add(at * k + unused).write(NO_EXPERT);
                        self.at(peer, received.weights).add(at * k + unused).write(0.0);
                    }
                }
            }
            let at = sent[peer] as usize * k + filled[peer];
            filled[peer] += 1;
            // SAFETY: as above; in addition, at most k slots of a token are filled.
            unsafe {
                self.at(peer, received.experts).add(at).write(experts[slot]);
                self.at(peer, received.weights).add(at).write(weights[slot]);
            }
        }
    }

    /// Computes, from all ranks' counts, the first row of this rank on each rank, and of each rank here.
    fn firsts(&self, capacity: usize, source_offsets: &mut [u32]) -> Result<[u32; MAX_WORLD], RankError> {
        let mut firsts = [0u32; MAX_WORLD];
        let (world, rank) = (self.world(), self.rank);
        for (to, first) in firsts.iter_mut().enumerate().take(world) {
            let count = |from: usize| u64::from(self.signals(from).counts[to].load(Relaxed));
            let rows: u64 = (0..world).map(count).sum();
            if rows > capacity as u64 {
                return Err(RankError::Capacity { rank: RankId::new(to as u16), rows, capacity: capacity as u64 });
            }
            *first = (0..rank).map(count).sum::<u64>() as u32;
            if to == rank {
                for (from, offset) in source_offsets.iter_mut().enumerate() {
                    *offset = (0..from).map(count).sum::<u64>() as u32;
                }
            }
        }
        Ok(firsts)
    }

    /// Checks all operands and counts the rows for each rank.
    fn check_dispatch<T: Element>(
        &self,
        routes: &Routes<'_, T>,
        received: Received<T>,
        out: &Dispatch<'_>,
    ) -> Result<[u32; MAX_WORLD], RankError> {
        self.check_alive()?;
        let (k, world) = (routes.top_k, self.world());
        check_below("top-k", 0, k.wrapping_sub(1), usize::from(u16::MAX))?;
        routes.tokens.check(routes.hidden, k, routes.rank_of_expert.len())?;
        let tokens = routes.tokens.experts.len() / k;
        check_len("sent rows", out.sent_rows.len(), tokens * world)?;
        check_len("source offsets", out.source_offsets.len(), world + 1)?;
        self.check_received(received, k, routes.hidden)?;
        for (expert, &rank) in routes.rank_of_expert.iter().enumerate() {
            check_below("rank of expert", expert, rank as usize, world)?;
        }
        let mut counts = [0u32; MAX_WORLD];
        for experts in routes.tokens.experts.chunks_exact(k) {
            let chosen = experts.iter().filter(|expert| **expert != NO_EXPERT);
            let mut ranks = chosen.fold(0u64, |ranks, &expert| ranks | 1 << routes.rank_of_expert[expert as usize]);
            while ranks != 0 {
                counts[ranks.trailing_zeros() as usize] += 1;
                ranks &= ranks - 1;
            }
        }
        Ok(counts)
    }

    fn check_received<T: Element>(&self, received: Received<T>, k: usize, hidden: usize) -> Result<(), RankError> {
        let Received { rows, tokens, experts, weights } = received;
        let capacity = tokens.len();
        RankError::check_limit("rows to receive", capacity, i32::MAX as usize)?;
        check_len("received rows", rows.len(), capacity.saturating_mul(hidden))?;
        check_len("received experts", experts.len(), capacity * k)?;
        check_len("received weights", weights.len(), capacity * k)?;
        self.check_span("received rows", rows)?;
        self.check_span("received tokens", tokens)?;
        self.check_span("received experts", experts)?;
        self.check_span("received weights", weights)?;
        let places = [
            ("received rows", rows.bytes()),
            ("received tokens", tokens.bytes()),
            ("received experts", experts.bytes()),
            ("received weights", weights.bytes()),
        ];
        for (at, (first, one)) in places.iter().enumerate() {
            if let Some((second, _)) = places[at + 1..].iter().find(|(_, other)| overlap(one, other)) {
                return Err(RankError::Overlap { first, second });
            }
        }
        Ok(())
    }
}

/// Hashes the placement and the ranges that are not words of the call.
fn digest<T: Element>(routes: &Routes<'_, T>, received: Received<T>) -> u64 {
    let places =
        [received.experts.offset() as u64, received.weights.offset() as u64, routes.rank_of_expert.len() as u64];
    let placement = routes.rank_of_expert.iter().map(|&rank| u64::from(rank));
    placement.chain(places).fold(0, mix)
}
