//! DP to TP, or small groups to a larger one: the pools of all ranks become one.

use std::collections::BTreeMap;

use super::plan::{KvPlan, PageAt, renumber};
use super::pool::{KvError, KvPage, KvPool, KvSequence, KvShape};

impl KvPlan {
    /// The union of all ranks' pools, which every rank has afterwards. Sealed pages with equal tokens in and before
    /// them are bitwise equal: the lowest rank's is kept. `capacity` is the number of pages of a rank's part that fit
    /// its memory.
    ///
    /// Idle pages are kept as far as there is room. They are evicted by their age in their own pools, counted from the
    /// youngest; a page in several pools has its lowest age. So no page is evicted before those that follow it.
    ///
    /// # Errors
    /// Invalid pools, or more pages, held and promised, than there is room for.
    pub fn gather(shape: KvShape, pools: &[KvPool], capacity: usize) -> Result<Self, KvError> {
        Self::merge(shape, 1, pools, capacity)
    }

    /// Merges the pools of groups of `width` ranks, one for each group.
    ///
    /// # Errors
    /// See [`KvPlan::gather`]; groups that do not fit the ranks.
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

/// The content of a sealed page: the previous page, and its tokens.
type Content = (Option<u32>, Vec<u32>);

#[derive(Debug, Default)]
struct Union {
    pool: KvPool,
    sources: Vec<PageAt>,
    /// For idle pages, the number of younger ones in their pool; the minimum over all pools.
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

    /// The number of a page in the union.
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
