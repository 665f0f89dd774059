//! The pools after a switch, and the copies that fill them.

use std::ops::Range;

use super::pool::{KvPool, KvShape};
use crate::hash::mix;

/// A page of a rank's pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageAt {
    /// The rank that has the pool. All ranks of a group have equal pools; the first of them stands for the group.
    pub rank: usize,
    /// Index in the pool.
    pub page: u32,
}

/// A pool after the switch.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct PlannedPool {
    /// The pages, sequences and idle pages, with new indices.
    pub pool: KvPool,
    /// `[pages]`: the old page that each new one is copied from.
    pub sources: Vec<PageAt>,
}

/// A copy of `rows` rows, one per layer, of `bytes` bytes each. Offsets are relative to the page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvMove {
    /// The page before the switch, on the rank that it is read from.
    pub from: PageAt,
    /// The page after the switch, in the destination rank's pool.
    pub page: u32,
    /// Number of layers.
    pub rows: usize,
    /// Bytes of the copied heads, which are adjacent, in one layer.
    pub bytes: usize,
    /// Offset of the first byte in the old page.
    pub from_offset: usize,
    /// Distance between layers in the old page.
    pub from_stride: usize,
    /// Offset of the first byte in the new page.
    pub to_offset: usize,
    /// Distance between layers in the new page.
    pub to_stride: usize,
}

/// Every rank's pool after a switch. Ranks that pass equal pools get equal plans, which they verify by comparing
/// [`KvPlan::digest`].
#[derive(Clone, PartialEq, Debug)]
pub struct KvPlan {
    pub(super) shape: KvShape,
    /// Number of ranks that share a pool, before and after the switch: 1 under DP.
    pub(super) before: usize,
    pub(super) after: usize,
    /// One pool per group after the switch.
    pub(super) pools: Vec<PlannedPool>,
}

impl KvPlan {
    /// The pools after the switch.
    pub fn pools(&self) -> &[PlannedPool] {
        &self.pools
    }

    /// Returns a rank's pool after the switch. Panics if there is no such rank.
    pub fn pool(&self, rank: usize) -> &PlannedPool {
        &self.pools[rank / self.after]
    }

    /// Returns the ranks that share a pool after the switch.
    pub fn ranks_of(&self, pool: usize) -> Range<usize> {
        pool * self.after..(pool + 1) * self.after
    }

    /// Whether a rank was in the group that had a page: it then has all of the group's data about the page, such as
    /// routes.
    pub fn had(&self, rank: usize, page: PageAt) -> bool {
        rank / self.before == page.rank / self.before
    }

    /// Fills `moves` with the copies that a rank's new pages need, ordered by page. Panics if there is no such rank.
    pub fn moves(&self, rank: usize, moves: &mut Vec<KvMove>) {
        moves.clear();
        for (page, &source) in self.pool(rank).sources.iter().enumerate() {
            self.copies(source, PageAt { rank, page: page as u32 }, moves);
        }
    }

    /// Copies a page's heads from ranks that have them: from this rank if possible, otherwise from the others in
    /// rotation.
    fn copies(&self, source: PageAt, to: PageAt, moves: &mut Vec<KvMove>) {
        let wanted = self.shape.heads_in(self.after, to.rank);
        let held = |rank: usize| self.shape.heads_in(self.before, rank);
        let group = source.rank..source.rank + self.before;
        let mut next = wanted.start;
        while next < wanted.end {
            let having = |rank: &usize| held(*rank).contains(&next);
            let count = group.clone().filter(having).count();
            let turn = (source.page as usize + to.rank) % count;
            let other = group.clone().filter(having).nth(turn);
            let own = group.contains(&to.rank) && having(&to.rank);
            let rank = if own { to.rank } else { other.unwrap_or(to.rank) };
            let held = held(rank);
            let heads = next..held.end.min(wanted.end);
            next = heads.end;
            moves.push(self.copy(PageAt { rank, ..source }, &held, to, &wanted, &heads));
        }
    }

    /// Returns the copy of `heads` from a page with the heads `held` to one with the heads `wanted`.
    fn copy(
        &self,
        from: PageAt,
        held: &Range<usize>,
        to: PageAt,
        wanted: &Range<usize>,
        heads: &Range<usize>,
    ) -> KvMove {
        let bytes = |heads: usize| heads * self.shape.head_bytes;
        KvMove {
            from,
            page: to.page,
            rows: self.shape.layers,
            bytes: bytes(heads.len()),
            from_offset: bytes(heads.start - held.start),
            from_stride: bytes(held.len()),
            to_offset: bytes(heads.start - wanted.start),
            to_stride: bytes(wanted.len()),
        }
    }

    /// Returns a digest of the plan. Two ranks with different plans almost certainly have different digests.
    pub fn digest(&self) -> u64 {
        let mut hash = 0;
        let mut word = |word: u64| hash = mix(hash, word.wrapping_add(1));
        for planned in &self.pools {
            let PlannedPool { pool, sources } = planned;
            let counts = [pool.pages.len(), pool.sequences.len(), pool.idle.len()];
            counts.into_iter().for_each(|count| word(count as u64));
            for (page, source) in pool.pages.iter().zip(sources) {
                word(page.before.map_or(u64::MAX, u64::from));
                word(u64::from(page.sealed) << 32 | page.tokens.len() as u64);
                page.tokens.iter().for_each(|&token| word(token.into()));
                word((source.rank as u64) << 32 | u64::from(source.page));
            }
            for sequence in &pool.sequences {
                [sequence.id, sequence.promised as u64, sequence.pages.len() as u64].into_iter().for_each(&mut word);
                sequence.pages.iter().for_each(|&page| word(page.into()));
            }
            pool.idle.iter().for_each(|&page| word(page.into()));
        }
        hash ^ (hash >> 32)
    }
}

/// Renumbers the kept pages, in order. The page before a kept one must be kept too.
pub(super) fn renumber(pool: KvPool, sources: &[PageAt], keep: &[bool]) -> PlannedPool {
    let mut numbers = vec![u32::MAX; keep.len()];
    let kept = keep.iter().enumerate().filter(|(_, keep)| **keep);
    for (new, (old, _)) in kept.enumerate() {
        numbers[old] = new as u32;
    }
    let number = |page: u32| numbers[page as usize];
    let pages = pool.pages.into_iter().zip(keep).filter(|(_, keep)| **keep);
    let pages = pages.map(|(mut page, _)| {
        page.before = page.before.map(number);
        page
    });
    let pages = pages.collect();
    let mut sequences = pool.sequences;
    sequences.iter_mut().flat_map(|sequence| &mut sequence.pages).for_each(|page| *page = number(*page));
    let idle = pool.idle.into_iter().filter(|&page| keep[page as usize]).map(number).collect();
    let sources = sources.iter().zip(keep).filter(|(_, keep)| **keep).map(|(source, _)| *source).collect();
    PlannedPool { pool: KvPool { pages, sequences, idle }, sources }
}
