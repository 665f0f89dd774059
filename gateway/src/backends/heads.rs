//! Streams waiting for their first chunk, with their ages, which are compared with TTFT targets (`switch.ttft_ms`).

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use semmoe_planner::policy::Head;

/// A waiting stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitingStream {
    pub(crate) since: Instant,
    /// `None` if no target can apply to this stream.
    pub(crate) priority: Option<u8>,
    pub(crate) prompt_tokens: u32,
}

/// A stream's position in the queue, unique among the streams waiting at one backend. Kept small because every request
/// carries one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Place(NonZeroU32);

/// The streams waiting at one backend. Maintained only while a policy has targets, because each request then takes a
/// lock.
#[derive(Default)]
pub(crate) struct WaitingLine {
    kept: AtomicBool,
    line: Mutex<Line>,
}

#[derive(Default)]
struct Line {
    last: u32,
    streams: HashMap<Place, WaitingStream>,
}

impl WaitingLine {
    /// Sets whether newly arriving streams are tracked.
    pub(crate) fn keep(&self, kept: bool) {
        self.kept.store(kept, Ordering::Relaxed);
    }

    /// Returns `None` if the queue is not maintained.
    pub(crate) fn join(&self, stream: WaitingStream) -> Option<Place> {
        self.kept.load(Ordering::Relaxed).then(|| {
            let mut line = self.lock();
            line.last = line.last.checked_add(1).unwrap_or(1);
            let place = Place(NonZeroU32::new(line.last).unwrap_or(NonZeroU32::MIN));
            line.streams.insert(place, stream);
            place
        })
    }

    fn lock(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn leave(&self, place: Place) {
        self.lock().streams.remove(&place);
    }

    /// Returns the oldest stream of each priority, with the total prompt tokens scheduled up to and including it.
    /// Assumes an engine queue in which each priority level is worth a head start of `priority_seconds`.
    pub(crate) fn heads(&self, now: Instant, priority_seconds: f64) -> Vec<Head> {
        let mut streams: Vec<WaitingStream> = self.lock().streams.values().copied().collect();
        let lead_seconds = |stream: &WaitingStream| {
            let waited = now.saturating_duration_since(stream.since);
            waited.as_secs_f64() + f64::from(stream.priority.unwrap_or(0)) * priority_seconds
        };
        streams.sort_by(|a, b| lead_seconds(b).total_cmp(&lead_seconds(a)).then(a.since.cmp(&b.since)));
        let (mut heads, mut tokens_ahead) = (Vec::<Head>::new(), 0_u64);
        for stream in streams {
            tokens_ahead += u64::from(stream.prompt_tokens);
            let Some(priority) = stream.priority else { continue };
            if heads.iter().all(|head| head.priority != priority) {
                let waited_seconds = now.saturating_duration_since(stream.since).as_secs_f64();
                heads.push(Head { priority, waited_seconds, tokens_ahead });
            }
        }
        heads
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_oldest_of_each_priority_waits_for_all_before_it() {
        let (line, began) = (WaitingLine::default(), Instant::now());
        let stream = |milliseconds, priority: u16, prompt_tokens| WaitingStream {
            since: began + Duration::from_millis(milliseconds),
            priority: u8::try_from(priority).ok(),
            prompt_tokens,
        };
        assert_eq!(line.join(stream(0, 0, 9)), None, "no policy has targets");
        line.keep(true);
        let places = [stream(0, 0, 100), stream(100, 7, 10), stream(200, 7, 1), stream(300, 0, 1000)]
            .map(|s| line.join(s).unwrap());
        let head = |priority, waited_seconds, tokens_ahead| Head { priority, waited_seconds, tokens_ahead };
        let now = began + Duration::from_millis(500);
        assert_eq!(line.heads(now, 0.0), [head(0, 0.5, 100), head(7, 0.4, 110)]);
        // Seven steps of 10 ms are not enough, seven of 20 ms are.
        assert_eq!(line.heads(now, 0.01), [head(0, 0.5, 100), head(7, 0.4, 110)]);
        assert_eq!(line.heads(now, 0.02), [head(7, 0.4, 10), head(0, 0.5, 110)]);
        // A stream without a target is still computed before later ones.
        let other = line.join(stream(50, 300, 5)).unwrap();
        assert_eq!(line.heads(now, 0.0), [head(0, 0.5, 100), head(7, 0.4, 115)]);
        line.leave(other);
        line.leave(places[1]);
        assert_eq!(line.heads(now, 0.0), [head(0, 0.5, 100), head(7, 0.3, 101)]);
        assert_eq!(line.heads(began, 0.0)[1].waited_seconds, 0.0, "a clock that was read earlier");
        // Streams that joined before the targets were removed still leave.
        line.keep(false);
        places.into_iter().for_each(|place| line.leave(place));
        assert_eq!((line.join(stream(0, 0, 1)), line.heads(now, 0.0)), (None, Vec::new()));
    }
}
