//! Where a rank leaves the rows that its peers read.

use crate::element::Element;

/// One of the two halves of a rank's memory. Collectives take turns with them: what a rank wrote for one collective may
/// be read by its peers until it has entered the next, and is written again no earlier than for the one after that. So
/// each collective needs a single barrier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Half {
    /// The first.
    #[default]
    Even,
    /// The second.
    Odd,
}

impl Half {
    /// The one that the next collective uses.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Even => Self::Odd,
            Self::Odd => Self::Even,
        }
    }
}

/// Memory of one rank in two halves, and of the peers that it can reach: those of one host, or of one NVLink domain.
pub trait RowMemory<T>: Send {
    /// Whether a peer's memory can be read from here, and this rank's from there: the same answer on both.
    fn reaches(&self, peer: usize) -> bool;

    /// Elements of a half; none where it grows as needed.
    fn limit(&self) -> Option<usize>;

    /// The first `len` elements of this rank's half, to be written, and the other half of all ranks, to be read.
    ///
    /// # Panics
    /// If a half is shorter.
    fn halves(&mut self, half: Half, len: usize) -> (&mut [T], PeerRows<'_, T>);

    /// The same half of this rank and of all peers within reach, to be read only in the turns that the collectives
    /// allow.
    fn read(&self, half: Half) -> PeerRows<'_, T>;
}

/// The same half of several ranks' memory.
#[derive(Clone, Copy, Debug)]
pub struct PeerRows<'a, T> {
    parts: Parts<'a, T>,
}

#[derive(Clone, Copy, Debug)]
enum Parts<'a, T> {
    Own { rank: usize, rows: &'a [T] },
    Shared(&'a [SharedRows<T>]),
}

/// Rows in memory that several ranks have mapped.
#[derive(Clone, Copy, Debug)]
pub struct SharedRows<T> {
    at: *const T,
    len: usize,
}

// SAFETY: a pointer to plain elements, which are only read through `PeerRows`, under the promise of `PeerRows::shared`.
unsafe impl<T: Element> Send for SharedRows<T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for SharedRows<T> {}

impl<T> SharedRows<T> {
    /// `len` elements from `at` on.
    pub fn new(at: *const T, len: usize) -> Self {
        Self { at, len }
    }

    /// Whether the rank is out of reach.
    pub fn is_null(&self) -> bool {
        self.at.is_null()
    }
}

impl<'a, T: Element> PeerRows<'a, T> {
    /// Of one rank alone.
    pub fn own(rank: usize, rows: &'a [T]) -> Self {
        Self { parts: Parts::Own { rank, rows } }
    }

    /// Of all ranks; null where a rank is out of reach.
    ///
    /// # Safety
    /// Rows that are not null are mapped for `'a`, aligned, and written by no rank while slices returned by
    /// [`PeerRows::of`] are in use.
    pub unsafe fn shared(parts: &'a [SharedRows<T>]) -> Self {
        Self { parts: Parts::Shared(parts) }
    }

    /// A rank's; empty if it is out of reach.
    pub fn of(&self, rank: usize) -> &'a [T] {
        match self.parts {
            Parts::Own { rank: own, rows } if own == rank => rows,
            Parts::Own { .. } => &[],
            Parts::Shared(parts) => match parts.get(rank) {
                // SAFETY: the promise of `shared`.
                Some(part) if !part.is_null() => unsafe { std::slice::from_raw_parts(part.at, part.len) },
                _ => &[],
            },
        }
    }
}

/// Memory that no other rank can reach: rows travel in messages.
#[derive(Debug, Default)]
pub struct PrivateMemory<T> {
    rank: usize,
    halves: [Vec<T>; 2],
}

impl<T: Element> PrivateMemory<T> {
    /// Memory of a rank, which grows as it is needed.
    pub fn new(rank: usize) -> Self {
        Self { rank, halves: Default::default() }
    }
}

impl<T: Element> RowMemory<T> for PrivateMemory<T> {
    fn reaches(&self, _peer: usize) -> bool {
        false
    }

    fn limit(&self) -> Option<usize> {
        None
    }

    fn halves(&mut self, half: Half, len: usize) -> (&mut [T], PeerRows<'_, T>) {
        let [even, odd] = &mut self.halves;
        let (own, other) = if half == Half::Even { (even, odd) } else { (odd, even) };
        own.resize(len, T::zeroed());
        (own, PeerRows::own(self.rank, other))
    }

    fn read(&self, half: Half) -> PeerRows<'_, T> {
        PeerRows::own(self.rank, &self.halves[half as usize])
    }
}
