//! Server-sent events relayed in pieces.

use bytes::Bytes;
use semmoe_engines::sse::Events;

/// Limit on buffered events, small enough for short inputs to reach.
const LIMIT: usize = 64;

/// The first byte says how many of the next bytes are lengths of pieces; the rest is the stream. Nothing is lost or
/// reordered, and whenever the relay reports the end of an event, it is one.
pub fn events(data: &[u8]) {
    let Some((&count, rest)) = data.split_first() else { return };
    let (lengths, stream) = rest.split_at(usize::from(count).min(rest.len()));
    for limit in [LIMIT, usize::MAX] {
        relay(lengths, stream, limit);
    }
}

fn relay(lengths: &[u8], stream: &[u8], limit: usize) {
    let ends = ends_of_events(stream);
    let mut events = Events::with_limit(limit);
    let mut sent = Vec::new();
    let mut at = 0;
    let mut lengths = lengths.iter();
    while at < stream.len() {
        let length = lengths.next().map_or(stream.len(), |length| usize::from(*length));
        let end = at.saturating_add(length).min(stream.len());
        sent.extend_from_slice(&events.push(Bytes::copy_from_slice(&stream[at..end])));
        assert_eq!(sent, stream[..sent.len()], "bytes moved");
        assert!(end - sent.len() <= limit, "more is held than allowed");
        if events.is_at_boundary() {
            assert!(ends[sent.len()], "{} is not the end of an event", sent.len());
        } else {
            assert!(limit < usize::MAX, "an event is cut without need");
        }
        at = end;
    }
    sent.extend_from_slice(&events.rest());
    assert_eq!(sent, stream, "bytes lost");
}

/// Whether an event, or nothing, ends just before each offset, by the standard's line endings and byte by byte.
fn ends_of_events(stream: &[u8]) -> Vec<bool> {
    let mut ends = vec![false; stream.len() + 1];
    ends[0] = true;
    let mut line_start = 0;
    let mut at = 0;
    while at < stream.len() {
        let length = match &stream[at..] {
            [b'\r', b'\n', ..] => 2,
            [b'\r' | b'\n', ..] => 1,
            _ => {
                at += 1;
                continue;
            }
        };
        if line_start == at {
            ends[at + length] = true;
            // A stream that is cut inside "\r\n" has also ended an event.
            ends[at + 1] = true;
        }
        at += length;
        line_start = at;
    }
    ends
}
