//! Consecutive errors of one backend, weighed against the responses of other backends in the same period.
//!
//! Some requests fail wherever they are sent. A request that fails here therefore counts once, and again only if
//! another backend has answered an identical request successfully. Together, the errors are evidence only while other
//! backends answer requests.

/// Maximum number of distinct requests remembered; older ones are dropped.
const REMEMBERED: usize = 32;

/// The current sequence of consecutive errors; empty while requests succeed.
#[derive(Clone, Debug, Default)]
pub(super) struct Errors {
    /// The newest distinct requests.
    requests: Vec<Failed>,
    /// Number of errors that count as evidence.
    pub(super) count: u32,
    /// Requests that the model's other backends have answered successfully since the first error.
    others: u32,
}

#[derive(Clone, Copy, Debug)]
struct Failed {
    /// Digest of the request.
    request: Option<u64>,
    /// Whether another backend has answered an identical request successfully.
    elsewhere: bool,
}

impl Errors {
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds an error. Returns whether it counts and raises the total to `wanted`, provided that other backends answered
    /// at least half as many requests successfully.
    pub(super) fn add(&mut self, request: Option<u64>, wanted: u32) -> bool {
        match self.requests.iter().find(|failed| failed.request == request) {
            Some(failed) if !failed.elsewhere => return false,
            Some(_) => {}
            None => {
                if self.requests.len() == REMEMBERED {
                    self.requests.remove(0);
                }
                self.requests.push(Failed { request, elsewhere: false });
            }
        }
        self.count = self.count.saturating_add(1);
        // Let earlier errors decay.
        if self.count >= wanted.max(1).saturating_mul(2) {
            (self.count, self.others) = (self.count.div_ceil(2), self.others / 2);
        }
        wanted > 0 && self.count >= wanted && self.others >= self.count.div_ceil(2)
    }

    /// Records that another backend of the model answered a request successfully.
    pub(super) fn answered_elsewhere(&mut self, request: Option<u64>) {
        if self.is_empty() {
            return;
        }
        self.others = self.others.saturating_add(1);
        let is_it = |failed: &&mut Failed| failed.request.is_some() && failed.request == request;
        if let Some(failed) = self.requests.iter_mut().find(is_it) {
            failed.elsewhere = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn one_request_counts_once_unless_another_backend_answers_it() {
        let mut errors = Errors::default();
        for _ in 0..100 {
            assert!(!errors.add(Some(7), 10));
            errors.answered_elsewhere(Some(8));
        }
        assert_eq!((errors.count, errors.others), (1, 100));
        errors.answered_elsewhere(Some(7));
        for expected in 2..12 {
            assert_eq!(errors.add(Some(7), 10), expected >= 10);
            assert_eq!(errors.count, expected);
        }
        assert!(!errors.add(Some(7), 0), "never");
    }

    #[test]
    fn without_others_nothing_is_enough() {
        let mut errors = Errors::default();
        (0..9).for_each(|_| errors.answered_elsewhere(None));
        for request in 0..1000 {
            assert!(!errors.add(Some(request), 10), "what others did before the first error is no evidence");
        }
        // They recover before this backend does.
        let answered = (0..).position(|request| {
            errors.answered_elsewhere(None);
            errors.add(Some(2000 + request), 10)
        });
        assert!(answered.is_some_and(|answered| answered < 20), "{answered:?}");
    }

    proptest! {
        /// However many requests fail and however often, each counts once until another backend answers an equal one.
        #[test]
        fn repeats_are_no_evidence(sent in proptest::collection::vec((0u64..20, any::<bool>()), 0..200)) {
            let mut errors = Errors::default();
            let mut distinct = std::collections::HashSet::new();
            for (request, fails) in sent {
                if fails {
                    errors.add(Some(request), 100);
                    distinct.insert(request);
                } else {
                    errors.answered_elsewhere(Some(1000 + request));
                }
                prop_assert_eq!(errors.count as usize, distinct.len());
                prop_assert!(errors.requests.len() <= REMEMBERED);
            }
        }
    }
}
