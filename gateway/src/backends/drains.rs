//! The names of the backends that an operator drained. A drain outlives its backend: a backend that leaves and returns,
//! or whose settings change, stays drained until an operator undrains it.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long an absent backend's drain is kept; its address may later be reused by another engine.
pub(crate) const KEPT: Duration = Duration::from_secs(24 * 60 * 60);
/// Maximum number of absent drained backends; beyond it, those that left first are forgotten.
const MAX_ABSENT: usize = 1024;

/// Drained backends by name, each with the time it left if it is absent.
#[derive(Default)]
pub(crate) struct Drains(Mutex<BTreeMap<String, Option<Instant>>>);

impl Drains {
    /// Sets whether a present backend is drained.
    pub(crate) fn set(&self, name: &str, draining: bool) {
        let mut names = self.lock();
        if draining {
            names.insert(name.to_owned(), None);
        } else {
            names.remove(name);
        }
    }

    /// Forgets a backend's drain. Returns false if it was not drained.
    pub(crate) fn forget(&self, name: &str) -> bool {
        self.lock().remove(name).is_some()
    }

    pub(crate) fn holds(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }

    /// Records which backends are present at `now`. Returns the forgotten names: absent for too long, or beyond the
    /// maximum.
    pub(crate) fn follow(&self, is_there: impl Fn(&str) -> bool, now: Instant) -> Vec<String> {
        let mut names = self.lock();
        for (name, left) in &mut *names {
            *left = if is_there(name) { None } else { left.or(Some(now)) };
        }
        let mut absent: Vec<(Instant, String)> =
            names.iter().filter_map(|(name, left)| Some(((*left)?, name.clone()))).collect();
        absent.sort();
        let too_many = absent.len().saturating_sub(MAX_ABSENT);
        let is_over = |at: usize, left: Instant| at < too_many || now.saturating_duration_since(left) >= KEPT;
        let over = absent.into_iter().enumerate().filter(|(at, (left, _))| is_over(*at, *left));
        let over: Vec<String> = over.map(|(_, (_, name))| name).collect();
        for name in &over {
            names.remove(name);
        }
        over
    }

    /// Returns the absent drained backends, and how long each has been absent.
    pub(crate) fn absent(&self, now: Instant) -> Vec<(String, Duration)> {
        let names = self.lock();
        let absent = names.iter().filter_map(|(name, left)| Some((name.clone(), (*left)?)));
        absent.map(|(name, left)| (name, now.saturating_duration_since(left))).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Option<Instant>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_kept_while_away_but_not_for_ever() {
        let (drains, start) = (Drains::default(), Instant::now());
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        drains.set("a", true);
        drains.set("b", true);
        assert!(drains.follow(|name| name == "a", at(5)).is_empty());
        assert!(drains.follow(|name| name == "a", at(9)).is_empty());
        assert_eq!(drains.absent(at(10)), [("b".to_owned(), Duration::from_secs(5))]);
        // It returns: the time starts over when it leaves again.
        assert!(drains.follow(|_| true, at(11)).is_empty());
        assert!(drains.holds("b") && drains.absent(at(11)).is_empty());
        assert!(drains.follow(|_| false, at(20)).is_empty());
        assert!(drains.follow(|_| false, at(19 + KEPT.as_secs())).is_empty());
        assert_eq!(drains.follow(|_| false, at(20 + KEPT.as_secs())), ["a", "b"]);
        assert!(!drains.holds("a") && !drains.holds("b"));
        drains.set("c", true);
        drains.set("c", false);
        assert!(!drains.holds("c") && !drains.forget("c"));
    }

    #[test]
    fn memory_is_bounded_and_the_first_to_leave_are_forgotten() {
        let (drains, start) = (Drains::default(), Instant::now());
        for number in 0..MAX_ABSENT as u64 + 2 {
            drains.set(&format!("pod-{number:04}"), true);
            let over = drains.follow(|_| false, start + Duration::from_millis(number));
            assert_eq!(over.is_empty(), number < MAX_ABSENT as u64, "{number}: {over:?}");
        }
        assert_eq!(drains.absent(start).len(), MAX_ABSENT);
        assert!(!drains.holds("pod-0000") && !drains.holds("pod-0001") && drains.holds("pod-0002"));
    }
}
