//! Stop texts: matched across token boundaries, cut off, and never partially emitted.

/// Searches streamed text for stop texts and releases only text that cannot be part of one.
#[derive(Clone, Debug)]
pub(crate) struct StopText {
    stops: Vec<String>,
    /// Withheld text that may be the start of a stop text.
    held: String,
}

impl StopText {
    pub(crate) fn new(stops: &[String]) -> Self {
        Self { stops: stops.iter().filter(|stop| !stop.is_empty()).cloned().collect(), held: String::new() }
    }

    /// Appends a piece; returns the released text and the stop text found, if any. The earliest match wins; among
    /// matches at the same position, the first in the list.
    pub(crate) fn push(&mut self, piece: &str) -> (String, Option<&str>) {
        self.held.push_str(piece);
        let stops = self.stops.iter().enumerate();
        let found = stops.filter_map(|(index, stop)| Some((self.held.find(stop.as_str())?, index))).min();
        if let Some((at, index)) = found {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), Some(&self.stops[index]));
        }
        let keep = self.stops.iter().map(|stop| open_length(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, rest), None)
    }

    /// Releases the remaining text at the end of the sequence.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Returns the length of the longest suffix of `text` that is a prefix of `stop`.
fn open_length(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len() - 1);
    let fits = |length: &usize| stop.is_char_boundary(*length) && text.ends_with(&stop[..*length]);
    (1..=longest).rev().find(fits).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(pieces: &[&str], stops: &[&str]) -> (String, Option<String>) {
        let mut watch = StopText::new(&stops.iter().map(|&stop| stop.to_owned()).collect::<Vec<_>>());
        let mut text = String::new();
        for piece in pieces {
            let (decided, stop) = watch.push(piece);
            text += &decided;
            if let Some(stop) = stop {
                return (text, Some(stop.to_owned()));
            }
        }
        (text + &watch.finish(), None)
    }

    #[test]
    fn stops_are_found_across_pieces() {
        let stopped = |text: &str, stop: &str| (text.to_owned(), Some(stop.to_owned()));
        assert_eq!(run(&["a<", "/s", ">b"], &["</s>"]), stopped("a", "</s>"));
        assert_eq!(run(&["a<", "/s", "x"], &["</s>"]), ("a</sx".into(), None));
        assert_eq!(run(&["ab\n\nc"], &["\n\n", "b"]), stopped("a", "b"));
        assert_eq!(run(&["aab"], &["ab", "aab"]), stopped("", "aab"));
        assert_eq!(run(&["é", "é"], &["éé"]), stopped("", "éé"));
        assert_eq!(run(&["x"], &[""]), ("x".into(), None));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn pieces_give_what_the_whole_gives(pieces in prop::collection::vec("[abé]{0,4}", 0..12), stops in prop::collection::vec("[abé]{1,4}", 0..3)) {
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let (text, stop) = run(&pieces, &stops);
            let whole = pieces.concat();
            // A stop text that ends earlier may be found before one that begins earlier. Either is right: no part of a
            // stop text is emitted.
            match stop {
                None => prop_assert_eq!(text, whole),
                Some(stop) => {
                    let rest = whole.strip_prefix(&text).unwrap();
                    prop_assert!(rest.starts_with(&stop));
                    prop_assert!(stops.iter().all(|stop| !text.contains(stop)));
                }
            }
        }
    }
}
