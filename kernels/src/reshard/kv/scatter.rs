//! TP to DP, or one group to smaller ones: assigns each sequence to one rank or group.

use std::cmp::Reverse;

use super::plan::{KvPlan, PageAt, PlannedPool, renumber};
use super::pool::{KvError, KvPool, KvSequence, KvShape};

/// How to balance sequences.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Balance {
    /// Number of pages, with all heads, that fit in a rank's memory.
    pub capacity: usize,
    /// Number of pages up to which a rank is assigned sequences; idle pages may exceed it.
    pub full: usize,
    /// Ranks with up to this many pages more than the least loaded one count as equally loaded; T's largest share
    /// decides between them.
    pub slack: usize,
}

impl KvPlan {
    /// Splits the pool shared by all ranks into one per rank. Sequences are assigned in descending order of length,
    /// including promised pages, each to the rank that would then have the fewest pages: a rank that already has a
    /// prefix of the sequence only needs the rest. Ranks within `slack` of the fewest pages are compared by T's share,
    /// then by pages; the lowest rank wins ties.
    ///
    /// Idle pages are assigned to a rank that has their previous page, youngest first, while there is room.
    ///
    /// # Errors
    /// If the pool is invalid, or no rank has room for a sequence (another packing might fit).
    pub fn scatter(shape: KvShape, pool: &KvPool, balance: Balance) -> Result<Self, KvError> {
        Self::split(shape, 1, pool, balance)
    }

    /// Splits the pool into one per group of `width` ranks, as [`KvPlan::scatter`] does for single ranks.
    ///
    /// # Errors
    /// See [`KvPlan::scatter`]; also if such groups do not fit the ranks.
    pub fn split(shape: KvShape, width: usize, pool: &KvPool, balance: Balance) -> Result<Self, KvError> {
        let groups = shape.groups(width)?;
        pool.check(0, groups)?;
        let none = Share { keep: vec![false; pool.pages.len()], ..Share::default() };
        let mut shares = vec![none; groups];
        let mut order: Vec<usize> = (0..pool.sequences.len()).collect();
        order.sort_by_key(|&index| {
            let sequence = &pool.sequences[index];
            (Reverse(sequence.pages.len() + sequence.promised), sequence.id, index)
        });
        for index in order {
            let sequence = &pool.sequences[index];
            let rank = choose(&shares, sequence, balance).ok_or(KvError::NoRoomFor {
                id: sequence.id,
                pages: sequence.pages.len() + sequence.promised,
                capacity: balance.full.min(balance.capacity),
            })?;
            shares[rank].take(index, sequence);
        }
        for &page in pool.idle.iter().rev() {
            let before = pool.pages[page as usize].before;
            let has = |share: &&mut Share| before.is_none_or(|before| share.keep[before as usize]);
            let room = |share: &&mut Share| share.used < balance.capacity;
            let emptiest = shares.iter_mut().filter(has).filter(room).min_by_key(|share| share.used + share.promised);
            if let Some(share) = emptiest {
                share.keep[page as usize] = true;
                share.used += 1;
            }
        }
        let pools = shares.iter().map(|share| share.planned(pool)).collect();
        Ok(Self { shape, before: shape.ranks(), after: width, pools })
    }
}

/// One rank's part.
#[derive(Clone, Debug, Default)]
struct Share {
    keep: Vec<bool>,
    used: usize,
    promised: usize,
    sequences: Vec<usize>,
}

impl Share {
    /// Returns the pages held and promised if this sequence were added.
    fn with(&self, sequence: &KvSequence) -> usize {
        let new = sequence.pages.iter().filter(|page| !self.keep[**page as usize]).count();
        self.used + new + self.promised + sequence.promised
    }

    fn take(&mut self, index: usize, sequence: &KvSequence) {
        for &page in &sequence.pages {
            self.used += usize::from(!std::mem::replace(&mut self.keep[page as usize], true));
        }
        self.promised += sequence.promised;
        self.sequences.push(index);
    }

    fn planned(&self, pool: &KvPool) -> PlannedPool {
        let mut own = self.sequences.clone();
        own.sort_unstable();
        let sequences = own.iter().map(|&index| pool.sequences[index].clone()).collect();
        let sources: Vec<PageAt> = (0..pool.pages.len()).map(|page| PageAt { rank: 0, page: page as u32 }).collect();
        renumber(KvPool { sequences, ..pool.clone() }, &sources, &self.keep)
    }
}

fn choose(shares: &[Share], sequence: &KvSequence, balance: Balance) -> Option<usize> {
    let loads: Vec<usize> = shares.iter().map(|share| share.with(sequence)).collect();
    let least = *loads.iter().min()?;
    let limit = least.saturating_add(balance.slack).min(balance.full).min(balance.capacity);
    let share = |rank: &usize| sequence.shares.get(*rank).copied().unwrap_or_default();
    let near = (0..shares.len()).filter(|&rank| loads[rank] <= limit);
    // Ties go to the least loaded, then the lowest rank.
    near.min_by(|a, b| share(b).total_cmp(&share(a)).then(loads[*a].cmp(&loads[*b])).then(a.cmp(b)))
}
