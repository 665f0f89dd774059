//! Parses server-sent events that arrive in arbitrary pieces, in bounded memory.

use bytes::Bytes;
use semmoe_engines::sse::Events as Boundaries;

/// Maximum event size in bytes. It is large because SGLang's `/generate` repeats the entire text in every event.
pub(crate) const MAX_EVENT_BYTES: usize = 4 << 20;

/// An event exceeds [`MAX_EVENT_BYTES`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooLong;

/// One complete event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Event<'a> {
    /// The `data` lines, joined by line feeds.
    pub(crate) data: &'a [u8],
    /// Whether its `event` line is `error`.
    pub(crate) is_error: bool,
}

/// The events of a stream; [`Boundaries`] finds where they end.
#[derive(Debug)]
pub(crate) struct Events {
    boundaries: Boundaries,
    data: Vec<u8>,
    has_data: bool,
    is_error: bool,
}

impl Default for Events {
    fn default() -> Self {
        let boundaries = Boundaries::with_limit(MAX_EVENT_BYTES);
        Self { boundaries, data: Vec::new(), has_data: false, is_error: false }
    }
}

impl Events {
    /// Appends a piece and calls `on_event` for every event that it completes, until `on_event` returns an error.
    pub(crate) fn push<E: From<TooLong>>(
        &mut self,
        piece: Bytes,
        mut on_event: impl FnMut(Event<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let complete = self.boundaries.push(piece);
        // An oversized event arrives in parts.
        if !self.boundaries.is_at_boundary() {
            return Err(TooLong.into());
        }
        let mut rest = &complete[..];
        while let Some(end) = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')) {
            let (line, after) = rest.split_at(end);
            rest = &after[if after.starts_with(b"\r\n") { 2 } else { 1 }..];
            self.end_line(line, &mut on_event)?;
        }
        Ok(())
    }

    /// Whether the stream ends here without an incomplete event.
    pub(crate) fn ends_at_boundary(mut self) -> bool {
        self.boundaries.rest().is_empty()
    }

    fn end_line<E>(&mut self, line: &[u8], on_event: &mut impl FnMut(Event<'_>) -> Result<(), E>) -> Result<(), E> {
        if line.is_empty() {
            let (has_data, is_error) = (std::mem::take(&mut self.has_data), std::mem::take(&mut self.is_error));
            let taken = if has_data || is_error { on_event(Event { data: &self.data, is_error }) } else { Ok(()) };
            self.data.clear();
            return taken;
        }
        if let Some(value) = field(line, b"data") {
            if std::mem::replace(&mut self.has_data, true) {
                self.data.push(b'\n');
            }
            self.data.extend_from_slice(value);
        } else if let Some(value) = field(line, b"event") {
            self.is_error = value == b"error";
        }
        Ok(())
    }
}

/// Returns the value of a `name: value` line.
fn field<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let value = line.strip_prefix(name)?;
    if value.is_empty() {
        return Some(value);
    }
    let value = value.strip_prefix(b":")?;
    Some(value.strip_prefix(b" ").unwrap_or(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn events(pieces: &[&[u8]]) -> (Vec<(String, bool)>, bool) {
        let (mut parser, mut found) = (Events::default(), Vec::new());
        for piece in pieces {
            let taken: Result<(), TooLong> = parser.push(Bytes::copy_from_slice(piece), |event| {
                found.push((String::from_utf8_lossy(event.data).into_owned(), event.is_error));
                Ok(())
            });
            assert_eq!(taken, Ok(()));
        }
        (found, parser.ends_at_boundary())
    }

    #[test]
    fn events_of_streams() {
        for (text, expected, at_boundary) in [
            ("data: 1\n\ndata: 2\n\n", vec![("1", false), ("2", false)], true),
            ("data:1\r\n\r\ndata: [DONE]\r\n\r\n", vec![("1", false), ("[DONE]", false)], true),
            ("data: 1\r\rdata: 2\r\r", vec![("1", false), ("2", false)], true),
            ("data: a\ndata: b\n\n", vec![("a\nb", false)], true),
            (": ping\n\nid: 3\n\nretry: 1\n\n", vec![], true),
            ("event: error\ndata: {}\n\ndata: x\n\n", vec![("{}", true), ("x", false)], true),
            ("event: error\n\n", vec![("", true)], true),
            ("data\n\n", vec![("", false)], true),
            ("database: 1\n\n", vec![], true),
            ("data: 1\n", vec![], false),
            ("data: 1", vec![], false),
            ("", vec![], true),
        ] {
            let expected: Vec<_> = expected.into_iter().map(|(data, error)| (data.to_owned(), error)).collect();
            assert_eq!(events(&[text.as_bytes()]), (expected, at_boundary), "{text:?}");
        }
    }

    #[test]
    fn endless_events_are_refused() {
        for filler in [&b"x"[..], b"data: xxxxxxx\n"] {
            let mut parser = Events::default();
            let piece = Bytes::from(filler.repeat((1 << 20) / filler.len()));
            let refused = (0..20).find(|_| parser.push(piece.clone(), |_| Ok::<(), TooLong>(())).is_err());
            assert!(refused.is_some_and(|pieces| (3..10).contains(&pieces)), "{refused:?}");
        }
    }

    proptest! {
        #[test]
        fn cuts_do_not_matter(text in "(data: ?[ab]{0,3}|event: error|:x|[ab]|\r\n|\n|\r){0,20}", cuts in proptest::collection::vec(0usize..90, 0..8)) {
            let bytes = text.as_bytes();
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|cut| *cut <= bytes.len()).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
            prop_assert_eq!(events(&pieces), events(&[bytes]));
        }
    }
}
