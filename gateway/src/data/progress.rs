//! A response's progress: when its first chunk arrived, and its number of tokens.
//!
//! A chunk costs one search for the engine's usage: no clock, no allocation, no lock.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use semmoe_engines::Route;
use semmoe_engines::pieces::output_tokens;

use crate::observe::{Generated, OutputTokens};

/// Observations about one response, kept small because every open stream has one: times saturate at 71 minutes, counts
/// at 4 billion.
#[derive(Default)]
pub(super) struct Progress {
    /// Microseconds from the start of the request to its first chunk.
    first: Option<NonZeroU32>,
    /// Token count that the engine reports as its usage, plus one.
    usage: Option<NonZeroU32>,
    /// Number of data lines in the event stream, plus one.
    data_lines: Option<NonZeroU32>,
}

/// Packs an optional number into four bytes.
fn and_one(number: u64) -> Option<NonZeroU32> {
    NonZeroU32::new(u32::try_from(number).unwrap_or(u32::MAX).saturating_add(1))
}

fn less_one(number: Option<NonZeroU32>) -> Option<u64> {
    number.map(|number| u64::from(number.get() - 1))
}

impl Progress {
    /// Records a chunk of a successful response to a request that began at `started`; an event stream has `data_lines`
    /// so far.
    pub(super) fn piece(&mut self, route: Route, started: Instant, piece: &[u8], data_lines: Option<u32>) {
        if self.first.is_none() {
            self.first = and_one(u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX));
        }
        if let Some(tokens) = output_tokens(route, piece) {
            self.usage = and_one(tokens);
        }
        self.data_lines = data_lines.and_then(|lines| and_one(u64::from(lines)));
    }

    /// Returns what the request generated.
    pub(super) fn generated(&self, route: Route, prompt_tokens: u64) -> Generated {
        let Some(first) = less_one(self.first).filter(|_| route.generates()) else { return Generated::default() };
        let lines = less_one(self.data_lines);
        let from_events = || Some(OutputTokens::Events(tokens_of_events(route, lines?)?));
        Generated {
            prompt_tokens: Some(prompt_tokens),
            output_tokens: less_one(self.usage).map(OutputTokens::Usage).or_else(from_events),
            first_token: lines.map(|_| Duration::from_micros(first)),
        }
    }
}

/// Number of events that carry a token: a chat begins with its role, and every stream on these routes ends with
/// `[DONE]`.
fn tokens_of_events(route: Route, events: u64) -> Option<u64> {
    let others = match route {
        Route::Chat => 2,
        Route::Completions | Route::Generate => 1,
        _ => return None,
    };
    Some(events.saturating_sub(others))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_kept_or_end() {
        for number in [0, 1, 7, u64::from(u32::MAX) - 1] {
            assert_eq!(less_one(and_one(number)), Some(number));
        }
        assert_eq!(less_one(and_one(u64::MAX)), Some(u64::from(u32::MAX) - 1));
        assert_eq!(size_of::<Progress>(), 12);
    }

    #[test]
    fn tokens_are_the_engines_or_else_events() {
        let piece = |usage: u64| format!("{{\"usage\":{{\"completion_tokens\":{usage}}}}}");
        for (route, pieces, lines, expected) in [
            (Route::Chat, vec![piece(3)], None, Some(OutputTokens::Usage(3))),
            (Route::Chat, vec!["data: {}".into(), piece(1), piece(2)], Some(9), Some(OutputTokens::Usage(2))),
            (Route::Chat, vec!["data: {}".into()], Some(9), Some(OutputTokens::Events(7))),
            (Route::Completions, vec!["data: {}".into()], Some(9), Some(OutputTokens::Events(8))),
            (Route::Chat, vec!["data: {}".into()], Some(1), Some(OutputTokens::Events(0))),
            (Route::Messages, vec!["data: {}".into()], Some(9), None),
            (Route::Chat, vec!["{}".into()], None, None),
            (Route::Chat, vec![], None, None),
            (Route::Embeddings, vec![piece(3)], None, None),
        ] {
            let started = Instant::now();
            let mut progress = Progress::default();
            pieces.iter().for_each(|piece| progress.piece(route, started, piece.as_bytes(), lines));
            let generated = progress.generated(route, 5);
            assert_eq!(generated.output_tokens, expected, "{route} {pieces:?} {lines:?}");
            assert_eq!(generated.first_token.is_some(), lines.is_some(), "{route} {pieces:?}");
            assert_eq!(
                generated.prompt_tokens.is_some(),
                route.generates() && !pieces.is_empty(),
                "{route} {pieces:?}"
            );
        }
    }
}
