//! Requests in a row that one backend answered with errors, compared with what others did meanwhile.
//!
//! An error in an answer can be the request's own fault, however often it is sent. So a request that failed here counts
//! once, and again only where another backend has answered the same one well; and all of them together are evidence
//! only while others answer requests.

/// Distinct requests of a run that are remembered, the last ones.
const REMEMBERED: usize = 32;

/// A run of errors; empty as long as requests go well.
#[derive(Clone, Debug, Default)]
pub(super) struct Errors {
    /// The last distinct requests.
    requests: Vec<Failed>,
    /// Those that count.
    pub(super) count: u32,
    /// Requests that other backends of the model answered well since the first of them.
    others: u32,
}

#[derive(Clone, Copy, Debug)]
struct Failed {
    /// A digest.
    request: Option<u64>,
    /// Another backend has answered such a one well.
    elsewhere: bool,
}

impl Errors {
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds an error. Returns whether it counts, and with the others makes so many as are `wanted`, while other
    /// backends answered at least half as many requests well.
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
        // Earlier ones weigh less.
        if self.count >= wanted.max(1).saturating_mul(2) {
            (self.count, self.others) = (self.count.div_ceil(2), self.others / 2);
        }
        wanted > 0 && self.count >= wanted && self.others >= self.count.div_ceil(2)
    }

    /// Another backend of the model answered a request well.
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
        // They recover before this one does.
        let answered = (0..).position(|request| {
            errors.answered_elsewhere(None);
            errors.add(Some(2000 + request), 10)
        });
        assert!(answered.is_some_and(|answered| answered < 20), "{answered:?}");
    }

    proptest! {
        /// However many requests fail how often: as long as no other backend answers one of them, each counts once.
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
