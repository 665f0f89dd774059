//! One rank's pool: pages, sequences and their order; page sizes.

use std::ops::Range;

/// The shape of a KV cache page, `[layers, heads, head_bytes]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvShape {
    pub(super) layers: usize,
    heads: usize,
    pub(super) head_bytes: usize,
    ranks: usize,
    latent: bool,
}

impl KvShape {
    /// Creates the shape of pages with `heads` heads on a node of `ranks` ranks. `head_bytes` is the size of one head
    /// in one layer, keys and values together, for all tokens of a page.
    ///
    /// # Errors
    /// If pages are empty or exceed the address space, or the ranks can neither split nor replicate the heads evenly.
    pub fn grouped(layers: usize, heads: usize, head_bytes: usize, ranks: usize) -> Result<Self, KvError> {
        if heads == 0 || ranks == 0 || !(heads.is_multiple_of(ranks) || ranks.is_multiple_of(heads)) {
            return Err(KvError::Heads { heads, ranks });
        }
        Self { layers, heads, head_bytes, ranks, latent: false }.check()
    }

    /// Creates the shape of latent cache pages, which all query heads read: every rank has them in full in any layout.
    ///
    /// # Errors
    /// If pages are empty or exceed the address space.
    pub fn latent(layers: usize, bytes: usize, ranks: usize) -> Result<Self, KvError> {
        if ranks == 0 {
            return Err(KvError::Heads { heads: 1, ranks });
        }
        Self { layers, heads: 1, head_bytes: bytes, ranks, latent: true }.check()
    }

    fn check(self) -> Result<Self, KvError> {
        let bytes = self.layers.checked_mul(self.heads).and_then(|heads| heads.checked_mul(self.head_bytes));
        match bytes {
            Some(1..) => Ok(self),
            _ => Err(KvError::Bytes { layers: self.layers, heads: self.heads, head_bytes: self.head_bytes }),
        }
    }

    /// Returns the number of groups of `width` ranks, provided that each group can have all heads.
    pub(super) fn groups(&self, width: usize) -> Result<usize, KvError> {
        let even = self.latent || (width > 0 && (self.heads.is_multiple_of(width) || width.is_multiple_of(self.heads)));
        match self.ranks.checked_div(width).filter(|groups| groups * width == self.ranks && even) {
            Some(groups) => Ok(groups),
            None => Err(KvError::Groups { width, ranks: self.ranks, heads: self.heads }),
        }
    }

    /// Number of ranks on the node.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns the range of all heads.
    pub(super) fn all(&self) -> Range<usize> {
        0..self.heads
    }

    /// Returns a rank's heads under TP.
    pub fn heads_of(&self, rank: usize) -> Range<usize> {
        self.heads_in(self.ranks, rank)
    }

    /// Returns a rank's heads in groups of `width` ranks that share them: all heads if `width` is 1.
    pub fn heads_in(&self, width: usize, rank: usize) -> Range<usize> {
        if self.latent {
            return self.all();
        }
        let first = rank % width * self.heads / width;
        first..first + (self.heads / width).max(1)
    }

    /// Returns the size of a page with these heads.
    pub fn page_bytes(&self, heads: &Range<usize>) -> usize {
        self.layers * heads.len() * self.head_bytes
    }
}

/// A page, identified by its index in the pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KvPage {
    /// The previous page; `None` for the first of a sequence.
    pub before: Option<u32>,
    /// Tokens in the page, at least one.
    pub tokens: Vec<u32>,
    /// Whether the page is full and identified by its content: it then never changes and may be shared. An unsealed
    /// page belongs to one sequence.
    pub sealed: bool,
}

/// A running sequence.
#[derive(Clone, PartialEq, Debug)]
pub struct KvSequence {
    /// Request id, unique in the unit.
    pub id: u64,
    /// The sequence's pages so far, in order.
    pub pages: Vec<u32>,
    /// Number of further pages that the sequence may allocate.
    pub promised: usize,
    /// `[ranks]` or `[groups]`: T's expected local share of the sequence on each; empty if unknown.
    pub shares: Vec<f32>,
}

/// The contents of a pool. Ranks exchange their pools before a switch to TP; under TP all pools are equal.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct KvPool {
    /// All pages. Each comes after its previous page.
    pub pages: Vec<KvPage>,
    /// Running sequences in admission order.
    pub sequences: Vec<KvSequence>,
    /// Pages that no sequence uses, in eviction order: a page comes after all pages that follow it in a sequence.
    pub idle: Vec<u32>,
}

/// An invalid pool or plan. Nothing was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum KvError {
    /// The ranks can neither split nor replicate the heads evenly.
    #[error("{ranks} ranks can neither split nor replicate {heads} KV heads evenly")]
    Heads {
        /// Number of KV heads.
        heads: usize,
        /// Number of ranks on the node.
        ranks: usize,
    },
    /// A page is empty or exceeds the address space.
    #[error("invalid page size: {layers} layers, {heads} heads, {head_bytes} bytes per head")]
    Bytes {
        /// Number of layers.
        layers: usize,
        /// Number of heads.
        heads: usize,
        /// Bytes per head and layer.
        head_bytes: usize,
    },
    /// The ranks do not split into groups of this size, or a group can neither split nor replicate the heads evenly.
    #[error("groups of {width} ranks do not fit {ranks} ranks with {heads} KV heads")]
    Groups {
        /// Ranks of a group.
        width: usize,
        /// Number of ranks on the node.
        ranks: usize,
        /// Number of KV heads.
        heads: usize,
    },
    /// The number of pools does not match the shape.
    #[error("{found} pools, expected {expected}: one per rank or group")]
    Ranks {
        /// Number of pools.
        found: usize,
        /// Number of ranks.
        expected: usize,
    },
    /// A pool is inconsistent.
    #[error("pool {pool}: {what} {index} {why}")]
    Pool {
        /// The pool.
        pool: usize,
        /// "page", "sequence" or "idle page".
        what: &'static str,
        /// Index in the pool.
        index: usize,
        /// The defect.
        why: &'static str,
    },
    /// All sequences together need more pages than a rank has in the new layout.
    #[error("all sequences together need {pages} pages, but a rank has room for {capacity}")]
    NoRoom {
        /// Pages held and promised.
        pages: usize,
        /// Pages per rank.
        capacity: usize,
    },
    /// No rank has room for a sequence.
    #[error("no rank has room for sequence {id} with {pages} pages; the limit per rank is {capacity}")]
    NoRoomFor {
        /// Request id.
        id: u64,
        /// Pages held by or promised to the sequence.
        pages: usize,
        /// Pages per rank.
        capacity: usize,
    },
}

impl KvPool {
    /// Returns the number of sequences that use each page.
    pub(super) fn holders(&self) -> Vec<usize> {
        let mut holders = vec![0; self.pages.len()];
        for &page in self.sequences.iter().flat_map(|sequence| &sequence.pages) {
            holders[page as usize] += 1;
        }
        holders
    }

    /// Checks that the pool is consistent; `pool` identifies it in errors.
    pub(super) fn check(&self, pool: usize, ranks: usize) -> Result<(), KvError> {
        let refuse = |what, index, why| Err(KvError::Pool { pool, what, index, why });
        for (index, page) in self.pages.iter().enumerate() {
            let before = page.before.map(|before| self.pages[..index].get(before as usize));
            match before {
                Some(None) => return refuse("page", index, "follows a page that does not precede it"),
                Some(Some(before)) if page.sealed && !before.sealed => {
                    return refuse("page", index, "is sealed, but follows an unsealed page");
                }
                _ if page.tokens.is_empty() => return refuse("page", index, "has no tokens"),
                _ => {}
            }
        }
        for (index, sequence) in self.sequences.iter().enumerate() {
            let mut before = None;
            for &page in &sequence.pages {
                match self.pages.get(page as usize) {
                    Some(found) if found.before == before => before = Some(page),
                    _ => return refuse("sequence", index, "has pages that do not form a chain"),
                }
            }
            let known = sequence.shares.iter().all(|share| share.is_finite());
            if !known || !(sequence.shares.is_empty() || sequence.shares.len() == ranks) {
                return refuse("sequence", index, "does not have one finite share per rank");
            }
        }
        self.check_idle(pool)
    }

    /// Idle pages must be distinct and unused by any sequence, and no page may be evicted before one that follows it.
    fn check_idle(&self, pool: usize) -> Result<(), KvError> {
        let refuse = |what, index, why| Err(KvError::Pool { pool, what, index, why });
        let mut holders = self.holders();
        let mut evicted = vec![false; self.pages.len()];
        for (index, &page) in self.idle.iter().enumerate() {
            match holders.get_mut(page as usize) {
                Some(holders @ 0) => *holders = 1,
                _ => return refuse("idle page", index, "is in use, listed twice, or out of range"),
            }
            evicted[page as usize] = true;
            let before = self.pages[page as usize].before;
            if !self.pages[page as usize].sealed || before.is_some_and(|before| evicted[before as usize]) {
                return refuse("idle page", index, "is unsealed, or is evicted after the page before it");
            }
        }
        for (index, (page, &holders)) in self.pages.iter().zip(&holders).enumerate() {
            if holders == 0 || (holders > 1 && !page.sealed) {
                return refuse("page", index, "is neither in use nor idle, or is shared but unsealed");
            }
        }
        Ok(())
    }
}
