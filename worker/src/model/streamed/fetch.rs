//! A thread that reads experts ahead of their layer.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::source::ExpertSource;
use crate::ep::ExpertsLost;
use crate::model::ModelError;
use crate::model::checkpoint::TensorPlace;
use crate::model::compute::Piece;
use crate::threads::lock;

/// Expert streaming statistics of a rank since startup.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ExpertFetches {
    /// Memory for experts in bytes: the resident experts, two layers of streamed experts and a buffer for reading one
    /// expert.
    pub memory_bytes: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Time spent reading and packing experts.
    pub fetching: Duration,
    /// Time that steps spent waiting for experts.
    pub waited: Duration,
}

impl ExpertFetches {
    /// Returns the fraction of fetch time during which no step was waiting, or 1 if nothing was read.
    pub fn hidden(&self) -> f64 {
        match self.fetching.as_secs_f64() {
            0.0 => 1.0,
            fetching => 1.0 - self.waited.as_secs_f64() / fetching,
        }
    }
}

/// One layer's streamed experts, packed.
#[derive(Debug)]
pub(super) struct Fetched {
    layer: usize,
    pub(super) words: Piece<u32>,
}

/// The queue between the reader thread and the rank.
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    empty: Vec<Piece<u32>>,
    /// In layer order.
    fetched: VecDeque<Fetched>,
    totals: ExpertFetches,
    /// The error that stopped the reader thread.
    failed: Option<Arc<ModelError>>,
    stop: bool,
}

impl Queue {
    /// Waits for a buffer to read into; returns `None` once the thread should stop.
    fn take_empty(&self) -> Option<Piece<u32>> {
        let waits = |state: &mut State| !state.stop && state.empty.is_empty();
        let mut state = self.changed.wait_while(lock(&self.state), waits).unwrap_or_else(PoisonError::into_inner);
        if state.stop { None } else { state.empty.pop() }
    }
}

/// Reads the experts of all L layers cyclically.
pub(super) struct Fetcher {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

impl Fetcher {
    /// Starts the reader thread. Each buffer must have room for the longest of the layers' expert lists.
    pub(super) fn start(
        source: ExpertSource,
        layers: Vec<Vec<[TensorPlace; 3]>>,
        buffers: [Piece<u32>; 2],
    ) -> Result<Self, ModelError> {
        let state = State {
            fetched: VecDeque::with_capacity(buffers.len()),
            empty: buffers.into(),
            totals: ExpertFetches::default(),
            failed: None,
            stop: false,
        };
        let queue = Arc::new(Queue { state: Mutex::new(state), changed: Condvar::new() });
        let of_thread = Arc::clone(&queue);
        let thread = std::thread::Builder::new()
            .name("experts".to_owned())
            .spawn(move || run(source, &layers, &of_thread))
            .map_err(|error| ModelError::ExpertMemory(format!("no reader thread: {error}").into()))?;
        Ok(Self { queue, thread: Some(thread) })
    }

    /// Waits for the experts of a layer.
    ///
    /// # Errors
    /// Fails if the reader thread has failed, so that the experts will never arrive.
    pub(super) fn wait(&self, layer: usize) -> Result<Fetched, ExpertsLost> {
        let mut state = lock(&self.queue.state);
        let mut began = None;
        let came = loop {
            match state.fetched.pop_front() {
                Some(fetched) if fetched.layer == layer => break Ok(fetched),
                // These experts are left over from a step that ended early.
                Some(other) => {
                    state.empty.push(other.words);
                    self.queue.changed.notify_all();
                }
                None => match &state.failed {
                    Some(error) => break Err(ExpertsLost(Arc::clone(error) as _)),
                    None => {
                        began.get_or_insert_with(Instant::now);
                        state = self.queue.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                    }
                },
            }
        };
        state.totals.waited += began.map_or(Duration::ZERO, |began: Instant| began.elapsed());
        came
    }

    /// Returns a layer's buffer to the reader thread.
    pub(super) fn give_back(&self, fetched: Fetched) {
        lock(&self.queue.state).empty.push(fetched.words);
        self.queue.changed.notify_all();
    }

    pub(super) fn totals(&self) -> ExpertFetches {
        lock(&self.queue.state).totals
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        lock(&self.queue.state).stop = true;
        self.queue.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // If the thread panicked, the queue reports the failure.
            drop(thread.join());
        }
    }
}

/// Marks the queue as failed however the thread ends, so that no step waits for it forever.
struct Ends<'a>(&'a Queue);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).failed.get_or_insert_with(|| Arc::new(ModelError::ReaderGone));
        self.0.changed.notify_all();
    }
}

fn run(mut source: ExpertSource, layers: &[Vec<[TensorPlace; 3]>], queue: &Queue) {
    let _ends = Ends(queue);
    let words = source.expert_words();
    for (layer, experts) in layers.iter().enumerate().cycle() {
        let Some(mut into) = queue.take_empty() else { return };
        let began = Instant::now();
        let places = experts.iter().zip(into.chunks_exact_mut(words));
        let read = places.map(|(places, words)| source.read(places, words)).sum::<Result<u64, _>>();
        let mut state = lock(&queue.state);
        match read {
            Ok(bytes) => {
                state.totals.bytes += bytes;
                state.totals.fetching += began.elapsed();
                state.fetched.push_back(Fetched { layer, words: into });
            }
            Err(error) => {
                state.failed = Some(Arc::new(error));
                return;
            }
        }
        queue.changed.notify_all();
    }
}
