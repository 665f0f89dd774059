//! One rank's blocks in LRU order: a map and a doubly linked list in fixed-size arrays.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::hash::scramble;

/// No such entry.
const NONE: u32 = u32::MAX;

/// The outcome of [`Lru::touch`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Touched {
    /// The block was already present.
    Known,
    /// The block was added, possibly evicting the least recently used one.
    New { forgotten: Option<u64> },
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    block: u64,
    newer: u32,
    older: u32,
}

/// Hashes block identifiers, which are already hashes unless a trace uses small integers.
#[derive(Clone, Copy, Debug, Default)]
struct BlockHasher(u64);

impl Hasher for BlockHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = scramble(self.0 ^ u64::from(byte));
        }
    }

    fn write_u64(&mut self, block: u64) {
        self.0 = scramble(block);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[derive(Debug)]
pub(super) struct Lru {
    capacity: u32,
    entries: Vec<Entry>,
    places: HashMap<u64, u32, BuildHasherDefault<BlockHasher>>,
    newest: u32,
    oldest: u32,
}

impl Lru {
    pub(super) fn new(capacity: u32) -> Self {
        // With twice the capacity, no sequence of removals and insertions makes the map grow.
        let places = HashMap::with_capacity_and_hasher(2 * capacity as usize, BuildHasherDefault::default());
        Lru { capacity, entries: Vec::with_capacity(capacity as usize), places, newest: NONE, oldest: NONE }
    }

    /// Returns the size of a full list in bytes: its entries, plus a map with at least twice as many slots of 16 bytes
    /// and one control byte each.
    pub(super) fn memory_bytes(capacity: u32) -> usize {
        let places = (2 * capacity as usize * 8 / 7).next_power_of_two();
        capacity as usize * size_of::<Entry>() + places * (size_of::<(u64, u32)>() + 1)
    }

    /// Makes a block the most recently used one.
    pub(super) fn touch(&mut self, block: u64) -> Touched {
        if let Some(&place) = self.places.get(&block) {
            self.unlink(place);
            self.link_newest(place);
            return Touched::Known;
        }
        let mut forgotten = None;
        let place = if self.entries.len() < self.capacity as usize {
            self.entries.push(Entry { block, newer: NONE, older: NONE });
            (self.entries.len() - 1) as u32
        } else {
            let place = self.oldest;
            let last = self.entries[place as usize].block;
            self.unlink(place);
            self.places.remove(&last);
            self.entries[place as usize].block = block;
            forgotten = Some(last);
            place
        };
        self.places.insert(block, place);
        self.link_newest(place);
        Touched::New { forgotten }
    }

    /// Removes a block; returns false if it was not present.
    pub(super) fn remove(&mut self, block: u64) -> bool {
        let Some(place) = self.places.remove(&block) else { return false };
        self.unlink(place);
        // Move the last entry into the gap.
        let Some(moved) = self.entries.pop() else { return false };
        if place as usize == self.entries.len() {
            return true;
        }
        self.entries[place as usize] = moved;
        self.places.insert(moved.block, place);
        self.join(moved.newer, place);
        self.join(place, moved.older);
        true
    }

    /// Iterates over all blocks, in no particular order.
    pub(super) fn blocks(&self) -> impl Iterator<Item = u64> {
        self.entries.iter().map(|entry| entry.block)
    }

    /// Iterates over all blocks, least recently used first.
    pub(super) fn oldest_first(&self) -> impl Iterator<Item = u64> {
        let mut next = self.oldest;
        std::iter::from_fn(move || {
            let entry = self.entries.get(next as usize)?;
            next = entry.newer;
            Some(entry.block)
        })
    }

    fn unlink(&mut self, place: u32) {
        let Entry { newer, older, .. } = self.entries[place as usize];
        self.join(newer, older);
    }

    fn link_newest(&mut self, place: u32) {
        self.join(place, self.newest);
        self.join(NONE, place);
    }

    /// Links two entries as neighbours in LRU order; [`NONE`] stands for the end of the list.
    fn join(&mut self, newer: u32, older: u32) {
        match newer {
            NONE => self.newest = older,
            newer => self.entries[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.entries[older as usize].newer = newer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The oracle is a list, most recent first.
        #[test]
        fn the_least_recently_used_is_forgotten(
            capacity in 1u32..8, blocks in prop::collection::vec((0u64..12, 0u8..4), 0..200),
        ) {
            let mut lru = Lru::new(capacity);
            let room = (lru.entries.capacity(), lru.places.capacity());
            let mut list: Vec<u64> = Vec::new();
            for (block, step) in blocks {
                if step == 0 {
                    let held = list.iter().position(|held| *held == block).map(|at| list.remove(at));
                    prop_assert_eq!(lru.remove(block), held.is_some());
                    prop_assert!(lru.oldest_first().eq(list.iter().rev().copied()));
                    continue;
                }
                let known = list.iter().position(|held| *held == block);
                let expected = match known {
                    Some(at) => { list.remove(at); Touched::Known }
                    None => {
                        let forgotten = if list.len() == capacity as usize { list.pop() } else { None };
                        Touched::New { forgotten }
                    }
                };
                list.insert(0, block);
                prop_assert_eq!(lru.touch(block), expected);
                let mut held: Vec<u64> = lru.blocks().collect();
                held.sort_unstable();
                let mut wanted = list.clone();
                wanted.sort_unstable();
                prop_assert_eq!(held, wanted);
                prop_assert!(lru.oldest_first().eq(list.iter().rev().copied()));
            }
            prop_assert_eq!((lru.entries.capacity(), lru.places.capacity()), room);
        }
    }
}
