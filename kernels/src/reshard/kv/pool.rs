//! Pages, sequences and their order in one rank's pool; the bytes of a page.

use std::ops::Range;

/// A page of keys and values, `[layers, heads, head_bytes]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvShape {
    pub(super) layers: usize,
    heads: usize,
    pub(super) head_bytes: usize,
    ranks: usize,
    latent: bool,
}

impl KvShape {
    /// Pages with `heads` heads, each with `head_bytes` bytes for all tokens of a page in one layer, keys and values
    /// together, on a node of `ranks` ranks.
    ///
    /// # Errors
    /// Empty pages, more bytes than can be addressed, or heads that the ranks can neither split nor replicate evenly.
    pub fn grouped(layers: usize, heads: usize, head_bytes: usize, ranks: usize) -> Result<Self, KvError> {
        if heads == 0 || ranks == 0 || !(heads.is_multiple_of(ranks) || ranks.is_multiple_of(heads)) {
            return Err(KvError::Heads { heads, ranks });
        }
        Self { layers, heads, head_bytes, ranks, latent: false }.check()
    }

    /// Pages of a latent cache, which all query heads read: every rank has them in full in either layout.
    ///
    /// # Errors
    /// Empty pages, or more bytes than can be addressed.
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

    /// How many groups of `width` ranks there are, if each can have all heads.
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

    /// The range of all heads.
    pub(super) fn all(&self) -> Range<usize> {
        0..self.heads
    }

    /// The heads of a rank under TP.
    pub fn heads_of(&self, rank: usize) -> Range<usize> {
        self.heads_in(self.ranks, rank)
    }

    /// The heads of a rank in groups of `width` ranks that share them; all heads where a group is one rank.
    pub fn heads_in(&self, width: usize, rank: usize) -> Range<usize> {
        if self.latent {
            return self.all();
        }
        let first = rank % width * self.heads / width;
        first..first + (self.heads / width).max(1)
    }

    /// Bytes of a page with these heads.
    pub fn page_bytes(&self, heads: &Range<usize>) -> usize {
        self.layers * heads.len() * self.head_bytes
    }
}

/// A page of a pool, identified by its index there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KvPage {
    /// The previous page; `None` for the first of a sequence.
    pub before: Option<u32>,
    /// Tokens in the page, at least one.
    pub tokens: Vec<u32>,
    /// Full and identified by its content: it never changes and may be shared. An unsealed page belongs to one
    /// sequence.
    pub sealed: bool,
}

/// A running sequence.
#[derive(Clone, PartialEq, Debug)]
pub struct KvSequence {
    /// Request id, unique in the unit.
    pub id: u64,
    /// All its pages so far, in order.
    pub pages: Vec<u32>,
    /// Number of further pages that it may take.
    pub promised: usize,
    /// `[ranks]`, or `[groups]`: the share of its activations that T expects on each rank; empty if unknown.
    pub shares: Vec<f32>,
}

/// The content of a pool. Ranks exchange these before a switch to TP; under TP they are equal.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct KvPool {
    /// A page follows its previous page.
    pub pages: Vec<KvPage>,
    /// Running sequences in order of admission.
    pub sequences: Vec<KvSequence>,
    /// Pages that no sequence holds, in order of eviction; a page comes after all pages that follow it.
    pub idle: Vec<u32>,
}

/// An invalid pool or plan. Nothing was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum KvError {
    /// The ranks can neither split nor replicate the heads evenly.
    #[error("{ranks} ranks can neither split nor replicate {heads} heads of keys and values evenly")]
    Heads {
        /// Number of heads of keys and values.
        heads: usize,
        /// Number of ranks on the node.
        ranks: usize,
    },
    /// Pages without bytes, or with too many.
    #[error("a page of {layers} layers, {heads} heads and {head_bytes} bytes each is invalid")]
    Bytes {
        /// Number of layers.
        layers: usize,
        /// Number of heads.
        heads: usize,
        /// Bytes of a head in a layer.
        head_bytes: usize,
    },
    /// The ranks do not split into groups of this size, or a group can neither split nor replicate the heads evenly.
    #[error("groups of {width} ranks do not fit {ranks} ranks with {heads} heads of keys and values")]
    Groups {
        /// Ranks of a group.
        width: usize,
        /// Number of ranks on the node.
        ranks: usize,
        /// Number of heads of keys and values.
        heads: usize,
    },
    /// The number of pools does not match the shape.
    #[error("there are {found} pools, expected {expected}, one for each rank or group")]
    Ranks {
        /// Number of pools.
        found: usize,
        /// Number of ranks.
        expected: usize,
    },
    /// A pool that no rank of the unit could have.
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
    #[error("no rank has room for sequence {id} with {pages} pages; each has {capacity}")]
    NoRoomFor {
        /// Request id.
        id: u64,
        /// Pages that it holds and was promised.
        pages: usize,
        /// Pages per rank.
        capacity: usize,
    },
}

impl KvPool {
    /// Number of sequences that hold each page.
    pub(super) fn holders(&self) -> Vec<usize> {
        let mut holders = vec![0; self.pages.len()];
        for &page in self.sequences.iter().flat_map(|sequence| &sequence.pages) {
            holders[page as usize] += 1;
        }
        holders
    }

    /// Checks that a rank of the unit could have this pool; `pool` names it in errors.
    pub(super) fn check(&self, pool: usize, ranks: usize) -> Result<(), KvError> {
        let refuse = |what, index, why| Err(KvError::Pool { pool, what, index, why });
        for (index, page) in self.pages.iter().enumerate() {
            let before = page.before.map(|before| self.pages[..index].get(before as usize));
            match before {
                Some(None) => return refuse("page", index, "follows one that is not before it"),
                Some(Some(before)) if page.sealed && !before.sealed => {
                    return refuse("page", index, "is sealed, but follows one that is not");
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
                return refuse("sequence", index, "has no share for each rank");
            }
        }
        self.check_idle(pool)
    }

    /// Idle pages must be distinct and held by no sequence, and no page may be evicted before one that follows it.
    fn check_idle(&self, pool: usize) -> Result<(), KvError> {
        let refuse = |what, index, why| Err(KvError::Pool { pool, what, index, why });
        let mut holders = self.holders();
        let mut evicted = vec![false; self.pages.len()];
        for (index, &page) in self.idle.iter().enumerate() {
            match holders.get_mut(page as usize) {
                Some(holders @ 0) => *holders = 1,
                _ => return refuse("idle page", index, "is held, there twice, or no page"),
            }
            evicted[page as usize] = true;
            let before = self.pages[page as usize].before;
            if !self.pages[page as usize].sealed || before.is_some_and(|before| evicted[before as usize]) {
                return refuse("idle page", index, "is not sealed, or goes after the page before it");
            }
        }
        for (index, (page, &holders)) in self.pages.iter().zip(&holders).enumerate() {
            if holders == 0 || (holders > 1 && !page.sealed) {
                return refuse("page", index, "is neither held nor idle, or shared but not sealed");
            }
        }
        Ok(())
    }
}
