//! Sequences waiting to join the batch, ordered by due time: arrival time minus a head start given by priority.
//!
//! Rank 0 sets the due times, so all ranks order sequences identically. Head starts are bounded: a sequence never waits
//! behind one that arrives later by more than that one's head start.

use std::collections::BTreeMap;
use std::time::Duration;

use super::request::SequenceRequest;

/// A sequence's position in the waiting order; the smallest runs next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Due {
    us: i64,
    id: u64,
}

impl Due {
    pub(super) fn of(request: &SequenceRequest) -> Self {
        Self { us: request.due_us, id: request.id }
    }
}

/// Returns the microseconds from the unit's start to a sequence's arrival, minus its head start.
pub(crate) fn due_us(arrived: Duration, priority: i16, priority_seconds: f64) -> i64 {
    (1e6 * (arrived.as_secs_f64() - f64::from(priority) * priority_seconds)) as i64
}

/// The waiting sequences on a rank.
#[derive(Debug, Default)]
pub(super) struct WaitingQueue(BTreeMap<Due, SequenceRequest>);

impl WaitingQueue {
    pub(super) fn push(&mut self, request: SequenceRequest) {
        self.0.insert(Due::of(&request), request);
    }

    pub(super) fn first(&self) -> Option<&SequenceRequest> {
        self.0.first_key_value().map(|(_, request)| request)
    }

    pub(super) fn pop_first(&mut self) -> Option<SequenceRequest> {
        self.0.pop_first().map(|(_, request)| request)
    }

    pub(super) fn remove(&mut self, id: u64) {
        self.0.retain(|due, _| due.id != id);
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// In order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &SequenceRequest> {
        self.0.values()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The ids of requests that arrive at these milliseconds with these priorities, in the order of the queue.
    fn order(priority_seconds: f64, requests: &[(u64, i16)]) -> Vec<usize> {
        let mut queue = WaitingQueue::default();
        for (id, &(milliseconds, priority)) in (0..).zip(requests) {
            let due_us = due_us(Duration::from_millis(milliseconds), priority, priority_seconds);
            queue.push(SequenceRequest { id, priority, due_us, ..SequenceRequest::default() });
        }
        assert_eq!(queue.len(), requests.len());
        let listed: Vec<usize> = queue.iter().map(|request| request.id as usize).collect();
        let first = queue.first().map(|request| request.id as usize);
        assert_eq!(first, listed.first().copied());
        let popped: Vec<usize> = std::iter::from_fn(|| queue.pop_first()).map(|request| request.id as usize).collect();
        assert_eq!(popped, listed);
        popped
    }

    #[test]
    fn a_priority_is_a_head_start_in_seconds() {
        let requests = [(0, 0), (3000, 0), (6000, 1), (9000, 2), (12_000, 0), (12_000, 0), (12_000, -1)];
        assert_eq!(order(0.0, &requests), [0, 1, 2, 3, 4, 5, 6]);
        // As if at 0, 3, 1, -1, 12, 12 and 17 s.
        assert_eq!(order(5.0, &requests), [3, 0, 2, 1, 4, 5, 6]);
        // At 0, 3, 11, 19, 12, 12 and 7 s.
        assert_eq!(order(-5.0, &requests), [0, 1, 6, 2, 4, 5, 3]);
    }

    #[test]
    fn a_removed_sequence_leaves_the_others_in_order() {
        let mut queue = WaitingQueue::default();
        for (id, due_us) in [(0, 5), (1, -7), (2, 5)] {
            queue.push(SequenceRequest { id, due_us, ..SequenceRequest::default() });
        }
        queue.remove(0);
        queue.remove(9);
        assert_eq!(queue.iter().map(|request| request.id).collect::<Vec<_>>(), [1, 2]);
    }

    proptest! {
        /// No class starves: a request waits at most for those that arrive within the difference of head starts.
        #[test]
        fn a_head_start_is_all_that_a_priority_gives(
            requests in proptest::collection::vec((0u64..100_000, -255i16..=255), 1..60),
            priority_seconds in 0.001f64..10.0,
        ) {
            let order = order(priority_seconds, &requests);
            for (at, &before) in order.iter().enumerate() {
                for &after in &order[at + 1..] {
                    let ((early, urgent), (late, ordinary)) = (requests[before], requests[after]);
                    let ahead = 1e-3 * (early as f64 - late as f64);
                    let head_start = priority_seconds * (f64::from(urgent) - f64::from(ordinary));
                    prop_assert!(ahead <= head_start + 1e-5, "{ahead} s later, a head start of {head_start} s");
                }
            }
        }
    }
}
