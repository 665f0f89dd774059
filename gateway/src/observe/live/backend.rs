//! The sampling state of one backend.

use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use semmoe_engines::probe::Probe;
use semmoe_engines::{Engine, Route, Version, routed};

use super::drift::Drift;
use crate::config::DriftRules;

/// The sampling state of one backend, which lives as long as the backend.
#[derive(Default)]
pub(crate) struct BackendLive {
    pub(crate) name: String,
    /// Number of eligible requests so far.
    sequence: AtomicU64,
    /// Number of due requests that could not be sampled, such as vLLM streams.
    unfit: AtomicU64,
    /// Whether routed experts can be requested, according to the last probe, for each of [`Route::ALL`].
    can_ask: [AtomicBool; Route::ALL.len()],
    /// Whether the engine rejects sampled requests that it accepts unsampled, or omits the routed experts.
    refused: AtomicBool,
    /// Whether all of the engine's responses contain routed experts, as vLLM's do if started with its flag.
    tells_unasked: AtomicBool,
    /// The engine's reported number of model layers, including dense ones; 0 if not reported.
    hidden_layers: AtomicU16,
    figures: Mutex<Figures>,
}

/// Statistics about the samples since the tables were loaded.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Figures {
    /// Generation of the tables; 0 if there are none.
    generation: u64,
    /// Local and total activations of the samples' tokens.
    pub(crate) local: u64,
    pub(crate) activations: u64,
    /// Number of samples with a prediction.
    pub(crate) compared: u64,
    /// Activations of the samples with a prediction: the total, the expected local number, and the observed local
    /// number.
    pub(crate) compared_activations: u64,
    pub(crate) predicted_local: f64,
    pub(crate) observed_local: u64,
    pub(crate) drift: Drift,
}

/// The activations of one sample.
pub(crate) struct Activations {
    pub(crate) local: u64,
    pub(crate) all: u64,
    /// Predicted fraction of local activations.
    pub(crate) predicted: Option<f64>,
}

impl Figures {
    /// Returns the predicted and the observed rate over all activations with a prediction.
    pub(crate) fn rates(&self) -> Option<(f64, f64)> {
        let all = self.compared_activations as f64;
        (all > 0.0).then(|| (self.predicted_local / all, self.observed_local as f64 / all))
    }
}

impl BackendLive {
    pub(crate) fn new(name: &str) -> Self {
        Self { name: name.to_owned(), ..Self::default() }
    }

    /// Records a probe; the engine may have been replaced.
    pub(crate) fn probed(&self, engine: Engine, probe: &Probe) {
        let version = probe.version.as_deref().and_then(Version::parse);
        let server = probe.server.as_ref();
        let denied = server.is_some_and(|server| server.enable_return_routed_experts == Some(false));
        let layers = server.and_then(|server| server.num_hidden_layers).unwrap_or(0);
        for (can_ask, route) in self.can_ask.iter().zip(Route::ALL) {
            can_ask.store(!denied && routed::can_ask(engine, version, route), Ordering::Relaxed);
        }
        self.hidden_layers.store(layers, Ordering::Relaxed);
        self.refused.store(false, Ordering::Relaxed);
        self.tells_unasked.store(false, Ordering::Relaxed);
    }

    /// Whether the engine's responses contain unrequested routed experts.
    pub(crate) fn tells_unasked(&self) -> bool {
        self.tells_unasked.load(Ordering::Relaxed)
    }

    /// Records that a vLLM response contained unrequested routed experts; returns true the first time.
    pub(crate) fn note_unasked(&self) -> bool {
        let is_first = !self.tells_unasked.swap(true, Ordering::Relaxed);
        if is_first {
            self.refused.store(false, Ordering::Relaxed);
        }
        is_first
    }

    pub(crate) fn can_ask(&self, route: Route) -> bool {
        let can_ask = self.can_ask.iter().zip(Route::ALL).find(|(_, known)| *known == route);
        can_ask.is_some_and(|(can_ask, _)| can_ask.load(Ordering::Relaxed))
    }

    /// Whether routed experts can be requested on any route.
    pub(crate) fn can_be_asked(&self) -> bool {
        self.can_ask.iter().any(|can_ask| can_ask.load(Ordering::Relaxed))
    }

    pub(crate) fn hidden_layers(&self) -> u16 {
        self.hidden_layers.load(Ordering::Relaxed)
    }

    pub(crate) fn has_refused(&self) -> bool {
        self.refused.load(Ordering::Relaxed)
    }

    /// Records that the engine refuses sampled requests; returns true the first time.
    pub(crate) fn refuse(&self) -> bool {
        !self.refused.swap(true, Ordering::Relaxed)
    }

    /// Whether to sample the next request: of n consecutive ones, `share` x n are sampled, as evenly as possible.
    pub(crate) fn take(&self, share: f64) -> bool {
        takes(self.sequence.fetch_add(1, Ordering::Relaxed), share)
    }

    /// Counts a due request that could not be sampled.
    pub(crate) fn note_unfit(&self) {
        self.unfit.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of due requests that could not be sampled.
    pub(crate) fn unfit(&self) -> u64 {
        self.unfit.load(Ordering::Relaxed)
    }

    pub(crate) fn figures(&self) -> Figures {
        *self.lock()
    }

    /// Switches to the tables of this generation and drops the statistics of other tables.
    pub(crate) fn follow(&self, generation: u64) {
        let mut figures = self.lock();
        if figures.generation != generation {
            *figures = Figures { generation, ..Figures::default() };
        }
    }

    /// Adds a sample predicted by the tables of this generation, unless other tables are in use by now. Returns the
    /// alarm's state if it changed.
    pub(crate) fn add(&self, generation: u64, sample: &Activations, rules: &DriftRules) -> Option<bool> {
        let Activations { local, all, predicted } = *sample;
        let mut figures = self.lock();
        if figures.generation != generation {
            return None;
        }
        figures.local += local;
        figures.activations += all;
        let predicted = predicted?;
        let predicted_local = predicted * all as f64;
        figures.compared += 1;
        figures.compared_activations += all;
        figures.predicted_local += predicted_local;
        figures.observed_local += local;
        figures.drift.observe(predicted_local - local as f64, all, rules)
    }

    fn lock(&self) -> MutexGuard<'_, Figures> {
        self.figures.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn takes(sequence: u64, share: f64) -> bool {
    let up_to = |n: u64| (n as f64 * share).floor();
    up_to(sequence + 1) > up_to(sequence)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn shares_are_spread_evenly() {
        let taken = |share, of: u64| (0..of).filter(|n| takes(*n, share)).collect::<Vec<_>>();
        assert!(taken(0.0, 1000).is_empty());
        assert_eq!(taken(1.0, 4), [0, 1, 2, 3]);
        assert_eq!(taken(0.25, 12), [3, 7, 11]);
    }

    proptest! {
        #[test]
        fn every_stretch_has_its_share(share in 0.0f64..=1.0, from in 0u64..1 << 40, length in 1u64..500) {
            let taken = (from..from + length).filter(|n| takes(*n, share)).count() as f64;
            prop_assert!((taken - length as f64 * share).abs() <= 1.01);
        }
    }
}
