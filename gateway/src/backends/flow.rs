//! The in-flight load on one backend, derived from its streams: prompts waiting for their first chunk, and running
//! streams.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::backends::WaitingStream;
use crate::backends::heads::{Place, WaitingLine};

/// Counters of one backend. Each is exact, but a joint read of several may be slightly inconsistent.
#[derive(Default)]
pub(crate) struct Flow {
    waiting_tokens: AtomicU64,
    waiting_streams: AtomicU64,
    running_streams: AtomicU64,
    arrived: AtomicU64,
    arrived_tokens: AtomicU64,
    /// Prompt tokens of streams whose first chunk has arrived, since the gateway started.
    computed_tokens: AtomicU64,
    /// Whether a chunk arrived since the last reading.
    moved: AtomicBool,
    pub(crate) line: WaitingLine,
}

/// One reading of a backend's [`Flow`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FlowReading {
    /// Prompt tokens of all requests waiting for the first response chunk.
    pub(crate) waiting_tokens: u64,
    /// Number of streams among the waiting requests.
    pub(crate) waiting_streams: u64,
    /// Number of streams past their first chunk.
    pub(crate) running_streams: u64,
    /// Number of requests placed since the gateway started, and their prompt tokens.
    pub(crate) arrived: u64,
    pub(crate) arrived_tokens: u64,
    /// Prompt tokens of streams whose first chunk has arrived, since the gateway started.
    pub(crate) computed_tokens: u64,
    /// Whether a response chunk arrived since the last reading.
    pub(crate) moved: bool,
}

impl Flow {
    /// Reads the counters and resets `moved`.
    pub(crate) fn read(&self) -> FlowReading {
        FlowReading { moved: self.moved.swap(false, Ordering::Relaxed), ..self.peek() }
    }

    /// Reads the counters without resetting `moved`.
    pub(crate) fn peek(&self) -> FlowReading {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        FlowReading {
            moved: self.moved.load(Ordering::Relaxed),
            waiting_tokens: read(&self.waiting_tokens),
            waiting_streams: read(&self.waiting_streams),
            running_streams: read(&self.running_streams),
            arrived: read(&self.arrived),
            arrived_tokens: read(&self.arrived_tokens),
            computed_tokens: read(&self.computed_tokens),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Waiting,
    Running,
}

/// One request's contribution to its backend's flow, removed on drop.
pub(crate) struct FlowPart {
    flow: Arc<Flow>,
    prompt_tokens: u32,
    streams: bool,
    stage: Stage,
    /// Its position in the queue, if a queue is maintained.
    place: Option<Place>,
}

impl FlowPart {
    /// Counts a newly placed request. `streams`: the response is streamed.
    pub(crate) fn begin(flow: &Arc<Flow>, request: WaitingStream, streams: bool) -> Self {
        let prompt_tokens = request.prompt_tokens;
        flow.waiting_tokens.fetch_add(prompt_tokens.into(), Ordering::Relaxed);
        flow.waiting_streams.fetch_add(u64::from(streams), Ordering::Relaxed);
        flow.arrived.fetch_add(1, Ordering::Relaxed);
        flow.arrived_tokens.fetch_add(prompt_tokens.into(), Ordering::Relaxed);
        // The first chunk of a non-streamed response is all of it.
        let place = if streams { flow.line.join(request) } else { None };
        Self { flow: Arc::clone(flow), prompt_tokens, streams, stage: Stage::Waiting, place }
    }

    /// Records that a response chunk arrived.
    pub(crate) fn piece(&mut self) {
        let flow = &self.flow;
        // Most calls change nothing and leave the cache line shared.
        if !flow.moved.load(Ordering::Relaxed) {
            flow.moved.store(true, Ordering::Relaxed);
        }
        if self.stage == Stage::Running {
            return;
        }
        self.leave();
        self.stage = Stage::Running;
        let flow = &self.flow;
        if self.streams {
            flow.computed_tokens.fetch_add(self.prompt_tokens.into(), Ordering::Relaxed);
            flow.running_streams.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn leave(&self) {
        let flow = &self.flow;
        let streams = u64::from(self.streams);
        match self.stage {
            Stage::Waiting => {
                if let Some(place) = self.place {
                    flow.line.leave(place);
                }
                flow.waiting_tokens.fetch_sub(self.prompt_tokens.into(), Ordering::Relaxed);
                flow.waiting_streams.fetch_sub(streams, Ordering::Relaxed);
            }
            Stage::Running => {
                flow.running_streams.fetch_sub(streams, Ordering::Relaxed);
            }
        }
    }
}

impl Drop for FlowPart {
    fn drop(&mut self) {
        self.leave();
    }
}
