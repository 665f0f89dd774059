//! DP to TP, or smaller groups to larger ones: merges the pools of all ranks into one.

use std::collections::BTreeMap;

use super::plan::{KvPlan, PageAt, renumber};
use super::pool::{KvError, KvPage, KvPool, KvSequence, KvShape};

impl KvPlan {
    /// Merges all ranks' pools into one, which every rank has afterwards. Sealed pages with equal tokens in and before
    /// them are bitwise equal, so only the lowest rank's copy is kept. `capacity` is the number of pages, each with a
    /// rank's part of the heads, that fit in a rank's memory.
    ///
    /// Idle pages are kept while there is room. The oldest are evicted first: a page's age is the number of younger
    /// idle pages in its own pool, and the minimum if it is in several pools. No page is therefore evicted before those
    /// that follow it.
    ///
    /// # Errors
    /// If a pool is invalid, or there is no room for all held and promised pages.
    pub fn gather(shape: KvShape, pools: &[KvPool], capacity: usize) -> Result<Self, KvError> {
        Self::merge(shape, 1, pools, capacity)
    }

    /// Merges the pools of groups of `width` ranks, one pool per group.
    ///
    /// # Errors
    /// See [`KvPlan::gather`]; also if such groups do not fit the ranks.
    pub fn merge(shape: KvShape, width: usize, pools: &[KvPool], capacity: usize) -> Result<Self, KvError> {
        let groups = shape.groups(width)?;
        if pools.len() != groups {
            return Err(KvError::Ranks { found: pools.len(), expected: groups });
        }
        let mut union = Union::default();
        for (group, pool) in pools.iter().enumerate() {
            pool.check(group, groups)?;
            union.add(group * width, pool);
        }
        let mut keep: Vec<bool> = union.pool.holders().iter().map(|&holders| holders > 0).collect();
        let used = keep.iter().filter(|keep| **keep).count();
        let promised: usize = union.pool.sequences.iter().map(|sequence| sequence.promised).sum();
        if used + promised > capacity {
            return Err(KvError::NoRoom { pages: used + promised, capacity });
        }
        // Oldest first.
        let mut idle: Vec<(usize, u32)> = Vec::new();
        for (page, age) in union.ages.iter().enumerate().filter(|(page, _)| !keep[*page]) {
            idle.extend(age.map(|age| (age, page as u32)));
        }
        idle.sort_unstable_by_key(|&(age, page)| (std::cmp::Reverse(age), page));
        let idle = &idle[idle.len().saturating_sub(capacity - used)..];
        idle.iter().for_each(|&(_, page)| keep[page as usize] = true);
        union.pool.idle = idle.iter().map(|&(_, page)| page).collect();
        let pools = vec![renumber(union.pool, &union.sources, &keep)];
        Ok(Self { shape, before: width, after: shape.ranks(), pools })
    }
}

/// A sealed page's content: the previous page and the page's own tokens.
type Content = (Option<u32>, Vec<u32>);

#[derive(Debug, Default)]
struct Union {
    pool: KvPool,
    sources: Vec<PageAt>,
    /// For idle pages, the number of younger idle pages in their pool, minimized over all pools.
    ages: Vec<Option<usize>>,
    known: BTreeMap<Content, u32>,
}

impl Union {
    fn add(&mut self, rank: usize, pool: &KvPool) {
        let mut numbers: Vec<u32> = Vec::with_capacity(pool.pages.len());
        for (index, page) in pool.pages.iter().enumerate() {
            let before = page.before.map(|before| numbers[before as usize]);
            let page = KvPage { before, ..page.clone() };
            numbers.push(self.number(page, PageAt { rank, page: index as u32 }));
        }
        for sequence in &pool.sequences {
            let pages = sequence.pages.iter().map(|&page| numbers[page as usize]).collect();
            self.pool.sequences.push(KvSequence { pages, ..sequence.clone() });
        }
        for (age, &page) in pool.idle.iter().rev().enumerate() {
            let least = &mut self.ages[numbers[page as usize] as usize];
            *least = Some(least.map_or(age, |least| least.min(age)));
        }
    }

    /// Returns a page's number in the union, after adding the page if it is new.
    fn number(&mut self, page: KvPage, source: PageAt) -> u32 {
        let next = self.pool.pages.len() as u32;
        if page.sealed {
            let number = *self.known.entry((page.before, page.tokens.clone())).or_insert(next);
            if number != next {
                return number;
            }
        }
        self.pool.pages.push(page);
        self.sources.push(source);
        self.ages.push(None);
        next
    }
}
