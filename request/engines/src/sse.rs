//! Event boundaries of a server-sent event stream.
//!
//! Relayed bytes always end at an event boundary, so that an error event can be inserted at any time without landing
//! inside another event. If a piece ends inside an event, the part after its last boundary is held back; no client
//! could use it before the event is complete. Pieces that end at a boundary, as engines usually send them, pass through
//! without a copy.

use bytes::{Bytes, BytesMut};

/// Maximum bytes held back. A longer event is relayed as it arrives, without waiting for its end.
const MAX_HELD_BYTES: usize = 1 << 20;

/// Tracks one stream.
#[derive(Debug)]
pub struct Events {
    /// Whether the current line is still empty.
    line_empty: bool,
    /// Whether the last byte was a carriage return, which a following line feed would complete.
    after_cr: bool,
    /// The start of an event whose end has not arrived.
    held: BytesMut,
    /// Whether the relayed bytes end at a boundary.
    at_boundary: bool,
    longest_held_bytes: usize,
    data_lines: u32,
}

impl Default for Events {
    fn default() -> Self {
        Self::with_limit(MAX_HELD_BYTES)
    }
}

impl Events {
    /// Creates a tracker with a different limit on the bytes held back.
    pub fn with_limit(longest_held_bytes: usize) -> Self {
        Self {
            line_empty: true,
            after_cr: false,
            held: BytesMut::new(),
            at_boundary: true,
            longest_held_bytes,
            data_lines: 0,
        }
    }

    /// Returns the number of data lines so far; engines write one per event. Comments and event names are not counted.
    pub fn data_lines(&self) -> u32 {
        self.data_lines
    }

    /// Returns whether the relayed bytes end at the end of an event.
    pub fn is_at_boundary(&self) -> bool {
        self.at_boundary
    }

    /// Accepts the next piece and returns the bytes that can be relayed now, possibly none.
    pub fn push(&mut self, piece: Bytes) -> Bytes {
        let complete = self.last_boundary(&piece).unwrap_or(0);
        if self.held.is_empty() && complete == piece.len() {
            self.at_boundary |= complete > 0;
            return piece;
        }
        if !self.at_boundary && complete == 0 {
            // The piece is inside an event that is too long to hold back.
            return piece;
        }
        self.at_boundary |= complete > 0;
        self.held.extend_from_slice(&piece[..complete]);
        let mut ready = if complete > 0 { self.held.split() } else { BytesMut::new() };
        self.held.extend_from_slice(&piece[complete..]);
        if self.held.len() > self.longest_held_bytes {
            ready.unsplit(self.held.split());
            self.at_boundary = false;
        }
        ready.freeze()
    }

    /// Returns the bytes held back, for a stream that ended normally.
    pub fn rest(&mut self) -> Bytes {
        self.held.split().freeze()
    }

    /// Drops the bytes held back; returns true if the gateway may append an event.
    pub fn cut_off(&mut self) -> bool {
        self.held.clear();
        self.at_boundary
    }

    /// Returns the offset just after the last event that ends in this piece.
    fn last_boundary(&mut self, piece: &[u8]) -> Option<usize> {
        // A line feed that completes the last event's line ending belongs to that event.
        let mut last = (self.after_cr && self.at_boundary && self.held.is_empty()).then_some(0);
        let mut at = 0;
        while at < piece.len() {
            match piece[at] {
                b'\n' if self.after_cr => {
                    // The line feed of a CRLF line ending; a boundary before it moves after it.
                    self.after_cr = false;
                    if last == Some(at) {
                        last = Some(at + 1);
                    }
                    at += 1;
                }
                end @ (b'\n' | b'\r') => {
                    if self.line_empty {
                        last = Some(at + 1);
                    }
                    self.line_empty = true;
                    self.after_cr = end == b'\r';
                    at += 1;
                }
                first => {
                    // Only `data`, among the valid field names, begins with this letter.
                    self.data_lines = self.data_lines.saturating_add(u32::from(self.line_empty && first == b'd'));
                    self.line_empty = false;
                    self.after_cr = false;
                    let line = &piece[at..];
                    at += memchr::memchr2(b'\n', b'\r', line).unwrap_or(line.len());
                }
            }
        }
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn relayed(pieces: &[&str]) -> Vec<String> {
        let mut events = Events::default();
        pieces
            .iter()
            .map(|piece| String::from_utf8(events.push(Bytes::copy_from_slice(piece.as_bytes())).to_vec()).unwrap())
            .collect()
    }

    #[test]
    fn pieces_end_at_boundaries() {
        for (pieces, expected) in [
            (vec!["data: 1\n\n", "data: 2\n\n"], vec!["data: 1\n\n", "data: 2\n\n"]),
            (vec!["data: 1\n\ndata: 2\n\n"], vec!["data: 1\n\ndata: 2\n\n"]),
            (vec!["data: 1\n\nda", "ta: 2\n", "\n"], vec!["data: 1\n\n", "", "data: 2\n\n"]),
            (vec!["data: 1\r\n\r\ndata: 2\r\r"], vec!["data: 1\r\n\r\ndata: 2\r\r"]),
            (vec!["data: 1\r\n\r", "\ndata: 2\n\n"], vec!["data: 1\r\n\r", "\ndata: 2\n\n"]),
            (vec!["data: 1\r", "\n", "\r\n"], vec!["", "", "data: 1\r\n\r\n"]),
            (vec!["event: a\ndata: b\n", "id: 1\n\n"], vec!["", "event: a\ndata: b\nid: 1\n\n"]),
            (vec!["data: 1\r\n\r", "\n", "da"], vec!["data: 1\r\n\r", "\n", ""]),
            (vec!["", "\n"], vec!["", "\n"]),
        ] {
            assert_eq!(relayed(&pieces), expected, "{pieces:?}");
        }
    }

    #[test]
    fn a_whole_piece_is_not_copied() {
        let piece = Bytes::from_static(b"data: 1\n\n");
        assert_eq!(Events::default().push(piece.clone()).as_ptr(), piece.as_ptr());
    }

    #[test]
    fn an_endless_event_is_not_held_for_ever() {
        let mut events = Events::default();
        let piece = Bytes::from(vec![b'x'; MAX_HELD_BYTES / 2]);
        assert!(events.push(piece.clone()).is_empty());
        assert!(events.push(piece.clone()).is_empty());
        assert_eq!(events.push(piece.clone()).len(), 3 * piece.len());
        assert_eq!(events.push(piece.clone()).len(), piece.len());
        assert!(!events.cut_off());
        assert_eq!(events.push(Bytes::from_static(b"\n\n")), "\n\n");
        assert!(events.cut_off());
    }

    #[test]
    fn lines_of_data_are_counted_however_they_are_cut() {
        for (pieces, expected) in [
            (vec!["data: 1\n\ndata: 2\n\n"], 2),
            (vec!["da", "ta: 1\n", "\n", "d", "ata: d\n\n"], 2),
            (vec!["event: delta\ndata: {\"d\":1}\n\n", ": ping\n\n"], 1),
            (vec!["data: 1\r\n\r", "\ndata: [DONE]\r\n\r\n"], 2),
        ] {
            let mut events = Events::default();
            pieces.iter().for_each(|piece| drop(events.push(Bytes::copy_from_slice(piece.as_bytes()))));
            assert_eq!(events.data_lines(), expected, "{pieces:?}");
        }
    }

    proptest! {
        /// However the stream is cut, nothing is lost, and every piece but the rest ends where an event ends.
        #[test]
        fn cuts_do_not_matter(text in "[ab\r\n]{0,40}", cuts in proptest::collection::vec(0usize..41, 0..8)) {
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|cut| *cut <= text.len()).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let mut events = Events::default();
            let mut sent = String::new();
            for pair in cuts.windows(2) {
                let piece = events.push(Bytes::copy_from_slice(&text.as_bytes()[pair[0]..pair[1]]));
                sent.push_str(std::str::from_utf8(&piece).unwrap());
                let half = sent.replace("\r\n", "\n").replace('\r', "\n");
                prop_assert!(sent.is_empty() || half == "\n" || half.ends_with("\n\n") || half.starts_with('\n') && half.len() == 1);
            }
            sent.push_str(std::str::from_utf8(&events.rest()).unwrap());
            prop_assert_eq!(sent, text);
        }
    }
}
