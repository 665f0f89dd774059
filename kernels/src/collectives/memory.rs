//! Memory for the rows that peers read.

use crate::element::Element;

/// One of the two halves of a rank's memory, which collectives use alternately. Peers may read what a rank wrote for
/// one collective until that rank has entered the next one, and the half is not overwritten before the collective after
/// that. Each collective therefore needs only one barrier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Half {
    /// The first half.
    #[default]
    Even,
    /// The second half.
    Odd,
}

impl Half {
    /// Returns the half that the next collective uses.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Even => Self::Odd,
            Self::Odd => Self::Even,
        }
    }
}

/// One rank's memory in two halves, and the memory of peers within reach: those on one host, or in one NVLink domain.
pub trait RowMemory<T>: Send {
    /// Whether this rank and `peer` can read each other's memory; both give the same answer.
    fn reaches(&self, peer: usize) -> bool;

    /// Returns the number of elements per half; `None` if it grows as needed.
    fn limit(&self) -> Option<usize>;

    /// Returns the first `len` elements of this rank's half for writing, and every rank's other half for reading.
    ///
    /// # Panics
    /// If a half is too short.
    fn halves(&mut self, half: Half, len: usize) -> (&mut [T], PeerRows<'_, T>);

    /// Returns this half of this rank's memory and of all peers within reach. Read it only when the collectives allow
    /// it.
    fn read(&self, half: Half) -> PeerRows<'_, T>;
}

/// One half of several ranks' memory.
#[derive(Clone, Copy, Debug)]
pub struct PeerRows<'a, T> {
    parts: Parts<'a, T>,
}

#[derive(Clone, Copy, Debug)]
enum Parts<'a, T> {
    Own { rank: usize, rows: &'a [T] },
    Shared(&'a [SharedRows<T>]),
}

/// Rows in memory mapped by several ranks.
#[derive(Clone, Copy, Debug)]
pub struct SharedRows<T> {
    at: *const T,
    len: usize,
}

// SAFETY: the pointer refers to plain elements, which are only read through `PeerRows`, under the contract of
// `PeerRows::shared`.
unsafe impl<T: Element> Send for SharedRows<T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for SharedRows<T> {}

impl<T> SharedRows<T> {
    /// Wraps `len` elements that start at `at`.
    pub fn new(at: *const T, len: usize) -> Self {
        Self { at, len }
    }

    /// Whether the rank is out of reach.
    pub fn is_null(&self) -> bool {
        self.at.is_null()
    }
}

impl<'a, T: Element> PeerRows<'a, T> {
    /// Wraps the rows of a single rank.
    pub fn own(rank: usize, rows: &'a [T]) -> Self {
        Self { parts: Parts::Own { rank, rows } }
    }

    /// Wraps the addresses of all ranks' memory; null if a rank is out of reach.
    ///
    /// # Safety
    /// Non-null rows must be mapped for `'a` and aligned, and no rank may write to them while slices returned by
    /// [`PeerRows::of`] are in use.
    pub unsafe fn shared(parts: &'a [SharedRows<T>]) -> Self {
        Self { parts: Parts::Shared(parts) }
    }

    /// Returns a rank's rows; empty if it is out of reach.
    pub fn of(&self, rank: usize) -> &'a [T] {
        match self.parts {
            Parts::Own { rank: own, rows } if own == rank => rows,
            Parts::Own { .. } => &[],
            Parts::Shared(parts) => match parts.get(rank) {
                // SAFETY: guaranteed by the contract of `shared`.
                Some(part) if !part.is_null() => unsafe { std::slice::from_raw_parts(part.at, part.len) },
                _ => &[],
            },
        }
    }
}

/// Memory that no other rank can access: rows travel in messages.
#[derive(Debug, Default)]
pub struct PrivateMemory<T> {
    rank: usize,
    halves: [Vec<T>; 2],
}

impl<T: Element> PrivateMemory<T> {
    /// Creates a rank's memory, which grows as needed.
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
