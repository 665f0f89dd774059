//! A single-producer, single-consumer ring of bytes in shared memory: one direction between two ranks.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release, SeqCst};

use super::memory::ShmMemory;

/// Maximum number of bytes copied at a time, so that the other side can start before a long message is complete.
const PIECE_BYTES: usize = 256 << 10;

/// The writer's end. Its own write position is authoritative; the copy in shared memory only informs the reader.
#[derive(Debug)]
pub(super) struct RingWriter {
    memory: Arc<ShmMemory>,
    from: usize,
    to: usize,
    written: u64,
}

/// The reader's end.
#[derive(Debug)]
pub(super) struct RingReader {
    memory: Arc<ShmMemory>,
    from: usize,
    to: usize,
    read: u64,
}

impl RingWriter {
    pub(super) fn new(memory: &Arc<ShmMemory>, from: usize, to: usize) -> Self {
        Self { memory: Arc::clone(memory), from, to, written: 0 }
    }

    /// Writes as much as fits, at most [`PIECE_BYTES`], and wakes the reader. Returns 0 if the ring is full; the reader
    /// then wakes this rank once there is room.
    pub(super) fn write<'a>(&mut self, parts: impl Iterator<Item = &'a [u8]>) -> io::Result<usize> {
        let (words, bytes) = self.memory.ring(self.from, self.to);
        let mut room = self.room(words.receiver.read.load(Acquire))?;
        if room == 0 {
            words.sender.starved.store(1, SeqCst);
            // The reader may have freed space just before `starved` became visible to it.
            room = self.room(words.receiver.read.load(SeqCst))?;
            if room == 0 {
                return Ok(0);
            }
        }
        let size = self.memory.layout.ring_bytes;
        let (mut count, room) = (0, room.min(PIECE_BYTES));
        for part in parts {
            let part = &part[..part.len().min(room - count)];
            let at = (self.written as usize + count) % size;
            let (first, second) = part.split_at(part.len().min(size - at));
            // SAFETY: both destinations are within the ring. The reader does not access them until `written` covers
            // them, and its `read` shows that it has consumed their previous contents.
            unsafe {
                bytes.add(at).copy_from_nonoverlapping(first.as_ptr(), first.len());
                bytes.copy_from_nonoverlapping(second.as_ptr(), second.len());
            }
            count += part.len();
        }
        self.written += count as u64;
        words.sender.written.store(self.written, Release);
        self.memory.bell(self.to).ring();
        Ok(count)
    }

    fn room(&self, read: u64) -> io::Result<usize> {
        let limit = self.memory.layout.ring_bytes;
        filled(self.written, read, limit).map(|filled| limit - filled)
    }
}

impl RingReader {
    pub(super) fn new(memory: &Arc<ShmMemory>, from: usize, to: usize) -> Self {
        Self { memory: Arc::clone(memory), from, to, read: 0 }
    }

    /// Reads available bytes, at most [`PIECE_BYTES`]; returns 0 if there are none.
    pub(super) fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let (words, bytes) = self.memory.ring(self.from, self.to);
        let size = self.memory.layout.ring_bytes;
        let there = filled(words.sender.written.load(Acquire), self.read, size)?;
        let count = there.min(to.len()).min(PIECE_BYTES);
        if count == 0 {
            return Ok(0);
        }
        let at = self.read as usize % size;
        let (first, second) = to[..count].split_at_mut(count.min(size - at));
        // SAFETY: both sources are within the ring and covered by `written`, so the writer does not touch them until
        // `read` passes them.
        unsafe {
            bytes.add(at).copy_to_nonoverlapping(first.as_mut_ptr(), first.len());
            bytes.copy_to_nonoverlapping(second.as_mut_ptr(), second.len());
        }
        self.read += count as u64;
        words.receiver.read.store(self.read, SeqCst);
        // Wake the writer only once at least half of the ring is free, so that it can write a lot at a time.
        if there - count <= size / 2 && words.sender.starved.load(SeqCst) != 0 {
            words.sender.starved.store(0, SeqCst);
            self.memory.bell(self.from).ring();
        }
        Ok(count)
    }
}

/// Returns the number of bytes between two positions; fails if the positions are inconsistent.
fn filled(written: u64, read: u64, limit: usize) -> io::Result<usize> {
    match written.checked_sub(read) {
        Some(filled) if filled <= limit as u64 => Ok(filled as usize),
        _ => {
            let at = format!("its ring is at {written} bytes written and {read} read");
            Err(io::Error::new(io::ErrorKind::InvalidData, format!("{at}, expected a difference of 0 to {limit}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ring() -> (Arc<ShmMemory>, RingWriter, RingReader) {
        let memory = Arc::new(ShmMemory::create(2, 0, 1).unwrap().1);
        let (writer, reader) = (RingWriter::new(&memory, 0, 1), RingReader::new(&memory, 0, 1));
        (memory, writer, reader)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn bytes_come_out_as_they_went_in(steps in prop::collection::vec((0usize..600_000, 0usize..600_000), 1..40)) {
            let (_memory, mut writer, mut reader) = ring();
            let source: Vec<u8> = (0..1 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            let (mut sent, mut received) = (0usize, 0usize);
            let mut buffer = vec![0; 600_000];
            let at = |position: usize| source[position % source.len()];
            for (write, read) in steps {
                let start = sent % source.len();
                let (first, second) = source[start..].split_at((write / 3).min(source.len() - start));
                sent += writer.write([first, &second[..second.len().min(write)]].into_iter()).unwrap();
                let count = reader.read(&mut buffer[..read]).unwrap();
                prop_assert!(buffer[..count].iter().enumerate().all(|(i, byte)| *byte == at(received + i)));
                received += count;
                prop_assert!(received <= sent);
            }
            while received < sent {
                received += reader.read(&mut buffer).unwrap();
            }
            prop_assert_eq!(received, sent);
        }
    }

    #[test]
    fn a_full_ring_takes_no_more_and_wakes_its_writer_when_half_of_it_is_read() {
        let (memory, mut writer, mut reader) = ring();
        let piece = vec![7; PIECE_BYTES];
        let mut wrote = 0;
        loop {
            let count = writer.write(std::iter::once(&piece[..])).unwrap();
            wrote += count;
            if count == 0 {
                break;
            }
        }
        assert_eq!(wrote, memory.layout.ring_bytes);
        let (rings, mut buffer) = (memory.bell(0).rings(), vec![0; memory.layout.ring_bytes / 2 - 1]);
        while !buffer.is_empty() {
            let count = reader.read(&mut buffer).unwrap();
            buffer.truncate(buffer.len() - count);
        }
        assert_eq!(memory.bell(0).rings(), rings);
        assert_eq!(reader.read(&mut [0]).unwrap(), 1);
        assert_eq!(memory.bell(0).rings(), rings + 1);
    }

    #[test]
    fn words_that_cannot_be_are_reported() {
        let (memory, mut writer, mut reader) = ring();
        let words = memory.ring(0, 1).0;
        words.sender.written.store(memory.layout.ring_bytes as u64 + 1, SeqCst);
        assert!(reader.read(&mut [0]).is_err());
        words.receiver.read.store(1, SeqCst);
        let error = writer.write(std::iter::once(&[1u8][..])).unwrap_err();
        assert!(error.to_string().contains("0 bytes written and 1 read"), "{error}");
    }
}
