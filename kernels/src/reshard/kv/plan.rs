//! The pools after a switch, and the copies that fill them.

use std::ops::Range;

use super::pool::{KvPool, KvShape};
use crate::hash::mix;

/// A page of a rank's pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageAt {
    /// The rank of the pool. The ranks of a group have equal pools, and it is the first of them.
    pub rank: usize,
    /// Index in the pool.
    pub page: u32,
}

/// A pool after the switch.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct PlannedPool {
    /// Its pages, sequences and idle pages, with new indices.
    pub pool: KvPool,
    /// `[pages]`: where each page comes from.
    pub sources: Vec<PageAt>,
}

/// A copy of `rows` rows of `bytes` bytes, one per layer; offsets are within a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvMove {
    /// The page before the switch and the rank that reads it.
    pub from: PageAt,
    /// The page after the switch, in the destination rank's pool.
    pub page: u32,
    /// Number of layers.
    pub rows: usize,
    /// Bytes of some neighbouring heads in one layer.
    pub bytes: usize,
    /// The first byte in the old page.
    pub from_offset: usize,
    /// Distance between layers in the old page.
    pub from_stride: usize,
    /// The first byte in the new page.
    pub to_offset: usize,
    /// Distance between layers in the new page.
    pub to_stride: usize,
}

/// Every rank's pool after a switch. Equal on all ranks that were given equal pools, which [`KvPlan::digest`] checks.
#[derive(Clone, PartialEq, Debug)]
pub struct KvPlan {
    pub(super) shape: KvShape,
    /// Ranks that share a pool before the switch, and after it: 1 under DP.
    pub(super) before: usize,
    pub(super) after: usize,
    /// One for each group after the switch.
    pub(super) pools: Vec<PlannedPool>,
}

impl KvPlan {
    /// The pools after the switch.
    pub fn pools(&self) -> &[PlannedPool] {
        &self.pools
    }

    /// A rank's pool after the switch. Panics if there is no such rank.
    pub fn pool(&self, rank: usize) -> &PlannedPool {
        &self.pools[rank / self.after]
    }

    /// The ranks with a pool after the switch.
    pub fn ranks_of(&self, pool: usize) -> Range<usize> {
        pool * self.after..(pool + 1) * self.after
    }

    /// Whether a rank was in the group that had a page: it knows what all its ranks know of the page, such as routes.
    pub fn had(&self, rank: usize, page: PageAt) -> bool {
        rank / self.before == page.rank / self.before
    }

    /// The copies that fill a rank's new pages, by page. Panics if there is no such rank.
    pub fn moves(&self, rank: usize, moves: &mut Vec<KvMove>) {
        moves.clear();
        for (page, &source) in self.pool(rank).sources.iter().enumerate() {
            self.copies(source, PageAt { rank, page: page as u32 }, moves);
        }
    }

    /// Copies the heads of a page from the ranks that have them: from this rank if possible, else in rotation.
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

    /// Copies heads from a page that has `held` to one that has `wanted`.
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

    /// A digest that is almost certainly equal on two ranks only if their plans are.
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

/// Renumbers the kept pages, in order. A kept page's predecessor is kept too.
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
