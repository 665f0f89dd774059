//! The limit on the total memory for request bodies.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::backends::RequestError;

/// Number of bytes held by request bodies, their copies and their parsed JSON trees.
#[derive(Default)]
pub(crate) struct BodyMemory(AtomicUsize);

impl BodyMemory {
    /// Reserves `bytes` of the `limit_bytes`, or nothing if too little is left.
    ///
    /// # Errors
    /// [`RequestError::BodyMemory`] if too little is left.
    pub(crate) fn take(&self, bytes: usize, limit_bytes: usize) -> Result<(), RequestError> {
        let fits = |held: usize| held.checked_add(bytes).filter(|held| *held <= limit_bytes);
        let taken = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        taken.map(|_| ()).map_err(|_| RequestError::BodyMemory { limit_bytes })
    }

    pub(crate) fn give_back(&self, bytes: usize) {
        self.0.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Number of bytes currently reserved.
    pub(crate) fn held_bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// A reservation of body memory, released on drop.
pub(crate) struct Held<'a> {
    memory: &'a BodyMemory,
    bytes: usize,
}

impl<'a> Held<'a> {
    /// Reserves `bytes` of the `limit_bytes`, to be released on drop.
    ///
    /// # Errors
    /// [`RequestError::BodyMemory`] if too little is left.
    pub(crate) fn take(memory: &'a BodyMemory, bytes: usize, limit_bytes: usize) -> Result<Self, RequestError> {
        memory.take(bytes, limit_bytes).map(|()| Self { memory, bytes })
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.memory.give_back(self.bytes);
    }
}

/// An upper bound on the memory for a parsed JSON text, in bytes. Each value follows one of four characters, and lists
/// grow by doubling. Such characters inside strings count too, but prompts have few.
pub(crate) fn tree_bytes(text: &[u8]) -> usize {
    // A one-element list has capacity for four, and an object's member owns its key.
    const VALUE_BYTES: usize = 4 * size_of::<serde_json::Value>() + 64;
    let signs = text.iter().filter(|byte| matches!(byte, b',' | b':' | b'[' | b'{')).count();
    signs.saturating_add(1).saturating_mul(VALUE_BYTES).saturating_add(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_part_takes_nothing() {
        let memory = BodyMemory::default();
        memory.take(60, 100).unwrap();
        assert!(memory.take(usize::MAX, 100).is_err(), "and does not wrap");
        assert!(memory.take(41, 100).is_err());
        memory.take(40, 100).unwrap();
        assert_eq!(memory.held_bytes(), 100);
        memory.give_back(100);
        assert_eq!(memory.held_bytes(), 0);
    }
}
