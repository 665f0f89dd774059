//! Removes the routed experts from a response in transit, and leaves all other bytes unchanged.
//!
//! A non-streamed response is buffered until it is complete, within a limit; in a stream only the events that carry the
//! routed experts are rewritten. In case of doubt the bytes are relayed unchanged, and the reason is counted.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use semmoe_engines::routed::{self, Cut, Place};

use super::seen::MISSING;

/// Why a response is not evaluated.
pub(super) type Outcome = &'static str;

/// The state of one response.
pub(super) struct Cutter {
    place: Place,
    /// Maximum size of a response or event that is buffered.
    pub(super) limit_bytes: usize,
    /// The bytes so far of a non-streamed response.
    held: Option<BytesMut>,
    /// The newest event with routed experts, which includes those of all earlier events.
    newest: Option<Bytes>,
    /// Why editing was abandoned, if so: the rest passes through unchanged.
    pub(super) over: Option<Outcome>,
}

impl Cutter {
    /// Starts an edit. `events`: the response is an event stream.
    pub(super) fn new(place: Place, limit_bytes: usize, events: bool) -> Self {
        Self { place, limit_bytes, held: (!events).then(BytesMut::new), newest: None, over: None }
    }

    /// Processes the next chunk and returns the bytes to relay now. Stream chunks must be whole events; `whole` is
    /// false once an event was too long to buffer.
    pub(super) fn push(&mut self, piece: Bytes, whole: bool) -> Bytes {
        if self.over.is_some() {
            return piece;
        }
        let Some(held) = &mut self.held else {
            if whole {
                return self.events(piece);
            }
            self.over = Some("too_long");
            return piece;
        };
        held.extend_from_slice(&piece);
        if held.len() <= self.limit_bytes {
            return Bytes::new();
        }
        self.over = Some("too_long");
        held.split().freeze()
    }

    /// Completes the response; `rest` contains the bytes that have not been pushed yet. Returns the bytes still to be
    /// relayed, and the JSON document with the routed experts.
    pub(super) fn end(&mut self, rest: Bytes) -> (Bytes, Result<Bytes, Outcome>) {
        let Some(mut held) = self.held.take().filter(|_| self.over.is_none()) else {
            let rest = if self.over.is_none() { self.events(rest) } else { rest };
            let newest = self.newest.take().ok_or(MISSING);
            return (rest, self.over.map_or(newest, Err));
        };
        held.extend_from_slice(&rest);
        let answer = held.freeze();
        match routed::cut(self.place, &answer) {
            Ok(Some(Cut { rest, found: true })) => (rest, Ok(answer)),
            Ok(cut) => (cut.map_or(answer, |cut| cut.rest), Err(MISSING)),
            Err(_) => (answer, Err("malformed")),
        }
    }

    fn events(&mut self, piece: Bytes) -> Bytes {
        let mut edited = BytesMut::new();
        let mut from = 0;
        for json in documents(&piece) {
            match routed::cut(self.place, &piece[json.clone()]) {
                Ok(None) => {}
                Ok(Some(cut)) => {
                    edited.extend_from_slice(&piece[from..json.start]);
                    edited.extend_from_slice(&cut.rest);
                    from = json.end;
                    if cut.found {
                        self.newest = Some(piece.slice(json));
                    }
                }
                Err(_) => {
                    self.over = Some("malformed");
                    break;
                }
            }
        }
        if from == 0 {
            return piece;
        }
        edited.extend_from_slice(&piece[from..]);
        edited.freeze()
    }
}

/// Locates the JSON objects in the events' `data` lines.
fn documents(events: &[u8]) -> impl Iterator<Item = Range<usize>> {
    let mut at = 0;
    let lines = events.split(|byte| matches!(byte, b'\n' | b'\r'));
    lines.filter_map(move |line| {
        let start = at;
        at += line.len() + 1;
        let data = line.strip_prefix(b"data:")?;
        let data = data.strip_prefix(b" ").unwrap_or(data);
        data.starts_with(b"{").then(|| start + line.len() - data.len()..start + line.len())
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use semmoe_engines::sse::Events;

    const LIMIT: usize = 256;

    /// Everything relayed of an answer that arrives in these chunks, and why it was not evaluated.
    fn relayed(pieces: &[&[u8]], events: bool) -> (String, Option<Outcome>) {
        let mut cutter = Cutter::new(Place::MetaInfo, LIMIT, events);
        let mut splitter = Events::with_limit(cutter.limit_bytes);
        let mut out = Vec::new();
        for piece in pieces {
            let piece = Bytes::copy_from_slice(piece);
            let (piece, whole) = if events { (splitter.push(piece), splitter.is_at_boundary()) } else { (piece, true) };
            out.extend_from_slice(&cutter.push(piece, whole));
        }
        let rest = if events { splitter.rest() } else { Bytes::new() };
        let (rest, newest) = cutter.end(rest);
        out.extend_from_slice(&rest);
        (String::from_utf8(out).unwrap(), newest.err())
    }

    #[test]
    fn whole_answers() {
        let long = format!(r#"{{"text":"{}","meta_info":{{"routed_experts":"x"}}}}"#, "y".repeat(LIMIT));
        for (answer, expected, outcome) in [
            (r#"{"text":"a","meta_info":{"id":1,"routed_experts":"x"}}"#, r#"{"text":"a","meta_info":{"id":1}}"#, None),
            (r#"{"meta_info":{"routed_experts":null}}"#, r#"{"meta_info":{}}"#, Some("missing")),
            (r#"{"text":"a"}"#, r#"{"text":"a"}"#, Some("missing")),
            (r#"{"meta_info":{"routed_experts":"x"}"#, r#"{"meta_info":{"routed_experts":"x"}"#, Some("malformed")),
            ("", "", Some("malformed")),
            (&long, &long, Some("too_long")),
        ] {
            let halves = answer.as_bytes().split_at(answer.len() / 2);
            let (text, counted) = relayed(&[halves.0, halves.1], false);
            assert_eq!((text.as_str(), counted), (expected, outcome), "{answer}");
        }
    }

    #[test]
    fn events_that_carry_it_are_edited() {
        let with = r#"data: {"text":"ab","meta_info":{"id":1,"routed_experts":"x"}}"#;
        let without = r#"data: {"text":"ab","meta_info":{"id":1}}"#;
        let bad = r#"data: {"text":"ab","meta_info":{"#;
        let long = format!("data: {{\"text\":\"{}\"}}", "y".repeat(LIMIT));
        for (stream, expected, outcome) in [
            (format!("{with}\n\ndata: [DONE]\n\n"), format!("{without}\n\ndata: [DONE]\n\n"), None),
            (format!(": ping\n\n{with}\r\n\r\n{with}\r\r"), format!(": ping\n\n{without}\r\n\r\n{without}\r\r"), None),
            (format!("event: a\n{with}\nid: 1\n\n"), format!("event: a\n{without}\nid: 1\n\n"), None),
            // Without a terminator, it is still an event to some clients.
            (with.to_owned(), without.to_owned(), None),
            ("data: [DONE]\n\n".to_owned(), "data: [DONE]\n\n".to_owned(), Some("missing")),
            (format!("{bad}\n\n{with}\n\n"), format!("{bad}\n\n{with}\n\n"), Some("malformed")),
            (format!("{long}\n\n{with}\n\n"), format!("{long}\n\n{with}\n\n"), Some("too_long")),
        ] {
            // Byte by byte: the long event is recognised as too long before it ends.
            let pieces: Vec<&[u8]> = stream.as_bytes().chunks(1).collect();
            let (text, counted) = relayed(&pieces, true);
            assert_eq!((text.as_str(), counted), (expected.as_str(), outcome), "{stream}");
        }
    }

    proptest! {
        /// However the stream is cut, the same bytes are relayed.
        #[test]
        fn cuts_do_not_matter(
            texts in proptest::collection::vec("[a-z\"{}\\\\: é]{0,12}", 1..5), crlf in any::<bool>(), done in any::<bool>(),
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..12)
        ) {
            let end = if crlf { "\r\n\r\n" } else { "\n\n" };
            let event = |text: &String, more: &str| {
                format!("data: {{\"text\":{},\"meta_info\":{{\"id\":1{more}}}}}{end}", serde_json::json!(text))
            };
            let tail = if done { format!("data: [DONE]{end}") } else { String::new() };
            let clean = texts.iter().map(|text| event(text, "")).collect::<String>() + &tail;
            let full = texts.iter().map(|text| event(text, ",\"routed_experts\":\"AAAA\"")).collect::<String>() + &tail;
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(full.len() + 1)).collect();
            cuts.extend([0, full.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &full.as_bytes()[pair[0]..pair[1]]).collect();
            let (text, counted) = relayed(&pieces, true);
            prop_assert_eq!(text, clean);
            prop_assert_eq!(counted, None);
        }
    }
}
