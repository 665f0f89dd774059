//! The state of one request: its lease on a rank, and the labels and clock for its metrics.

use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;
use std::time::Instant;

use semmoe_engines::Route;
use semmoe_tables::RankId;

use super::progress::Progress;
use super::{DataPlane, Job, Placed, Record, trace};
use crate::backends::breaker::Outcome;
use crate::backends::{Backend, FlowPart, RequestError};
use crate::observe::{CLIENT_CLOSED, Done, Generated, NONE, Place, RequestTrace, Stage};

/// Counts its request exactly once: in [`Ticket::finish`], or as closed by the client if it is dropped first.
pub(crate) struct Ticket {
    pub(super) plane: Arc<DataPlane>,
    /// The backend of the latest attempt.
    backend: Option<Arc<Backend>>,
    place: Place,
    policy: &'static str,
    started: Instant,
    pub(super) arrived: Instant,
    /// For the access log.
    pub(super) record: Record,
    progress: Progress,
    placed: Option<Placed>,
    /// Held while the request is placed, on a route that runs the model.
    flow: Option<FlowPart>,
    /// Timings of each stage, if the request is traced.
    pub(super) trace: Option<Box<RequestTrace>>,
    /// Whether this attempt was reported to the breaker.
    judged: bool,
    /// Digest of the body, which identifies identical requests; kept while one of the model's backends returns errors.
    digest: Option<u64>,
    finished: bool,
    /// Memory charged for the body, and for the largest copy sent.
    held_bytes: usize,
    copy_bytes: usize,
}

impl Ticket {
    pub(crate) fn new(plane: Arc<DataPlane>, record: Record) -> Self {
        let started = Instant::now();
        Self {
            held_bytes: 0,
            copy_bytes: 0,
            plane,
            backend: None,
            place: Place::Nowhere,
            policy: NONE,
            started,
            arrived: started,
            record,
            progress: Progress::default(),
            placed: None,
            flow: None,
            trace: None,
            judged: false,
            digest: None,
            finished: false,
        }
    }

    /// Begins the request's next stage.
    pub(crate) fn enter(&mut self, stage: Stage) {
        if let Some(trace) = &mut self.trace {
            trace.enter(stage);
        }
    }

    /// Begins scoring: the body has arrived, or the model's backends have changed.
    pub(super) fn arrive(&mut self) {
        self.arrived = Instant::now();
        self.enter(Stage::Score);
    }

    /// Records that the request was read.
    pub(super) fn read(&mut self, job: &Job) {
        self.record.read(&job.model, job.scored.tokens, job.streams);
        trace::scored(self, job);
        self.policy = job.policy.acting_name();
    }

    /// Records that the request was placed, on `rank` if known, and releases an earlier lease. `flow` is the request's
    /// part of the backend's load, if it runs the model.
    pub(crate) fn place(
        &mut self,
        backend: &Arc<Backend>,
        rank: Option<RankId>,
        placed: Placed,
        flow: Option<FlowPart>,
    ) {
        self.backend = Some(Arc::clone(backend));
        self.place = rank.map_or(Place::Any, Place::Rank);
        self.policy = placed.policy;
        self.placed = Some(placed);
        self.flow = flow;
        self.judged = false;
    }

    /// Records that the rank answered.
    pub(crate) fn answered(&self) {
        if let Some(placed) = &self.placed {
            placed.lease.answered();
        }
    }

    /// Records that the engine refused the request, whose prompt has these blocks, without running it.
    pub(crate) fn refused(&self, blocks: &[u64]) {
        if let Some(placed) = &self.placed {
            placed.lease.refused(blocks);
        }
    }

    /// Records a chunk of a successful response; an event stream has `data_lines` so far.
    pub(crate) fn note_piece(&mut self, piece: &[u8], data_lines: Option<u32>) {
        if let Some(route) = self.record.route {
            self.progress.piece(route, self.started, piece, data_lines);
        }
        if let Some((placed, lines)) = self.placed.as_mut().zip(data_lines) {
            placed.lease.generates(u64::from(lines));
        }
    }

    /// Records a response chunk; the first one shows that the prompt was computed.
    pub(crate) fn piece(&mut self) {
        if let Some(flow) = &mut self.flow {
            flow.piece();
        }
        if let Some(placed) = &mut self.placed {
            placed.lease.computed();
        }
    }

    /// Ends a failed attempt; the request may be placed again.
    pub(crate) fn unplace(&mut self) {
        self.placed = None;
        self.flow = None;
    }

    /// Stores a digest of the body, which identifies identical requests.
    pub(crate) fn recognise(&mut self, body: &[u8]) {
        let mut hasher = DefaultHasher::new();
        hasher.write(body);
        self.digest = Some(hasher.finish());
    }

    /// Records that the backend could not be reached.
    pub(crate) fn failed(&mut self, backend: &Arc<Backend>) {
        self.judge(backend, Outcome::Failed);
    }

    /// Records that the backend returned an error of its own, broke off or took too long, which the request may have
    /// caused.
    pub(crate) fn erred(&mut self, backend: &Arc<Backend>) {
        self.judge(backend, Outcome::Erred { request: self.digest });
    }

    /// Records that the last byte of the backend's response was sent.
    pub(crate) fn complete(&mut self, backend: &Arc<Backend>, code: u16) {
        let ran = self.record.route.is_some_and(Route::runs_model);
        match code {
            _ if self.finished => {}
            200..300 if ran => self.judge(backend, Outcome::Well),
            ..500 => self.judge(backend, Outcome::Answered),
            // The response head has already been judged.
            _ => {}
        }
        self.finish(code);
    }

    fn judge(&mut self, backend: &Arc<Backend>, outcome: Outcome) {
        let Some(placed) = self.placed.as_mut().filter(|_| !self.judged) else { return };
        self.plane.backends.judge(backend, placed.trial.take(), outcome);
        self.judged = true;
        if outcome == Outcome::Well {
            self.record.model().into_iter().for_each(|model| model.answered_well(backend, self.digest));
        }
    }

    /// Charges additional body bytes to the request.
    ///
    /// # Errors
    /// [`RequestError::BodyMemory`] if all requests together hold too many.
    pub(crate) fn hold(&mut self, bytes: usize) -> Result<(), RequestError> {
        let limit_bytes = self.plane.backends.current.load().config.limits.body_memory_bytes;
        self.plane.body_memory.take(bytes, limit_bytes)?;
        self.held_bytes += bytes;
        Ok(())
    }

    /// Takes over bytes that have already been charged to the body memory.
    pub(crate) fn take_over(&mut self, bytes: usize) {
        self.held_bytes += bytes;
    }

    /// Charges the copy of the body that an attempt sends; the previous attempt's copy has been freed.
    ///
    /// # Errors
    /// [`RequestError::BodyMemory`] if all requests together hold too many bytes.
    pub(crate) fn hold_copy(&mut self, bytes: usize) -> Result<(), RequestError> {
        self.hold(bytes.saturating_sub(self.copy_bytes))?;
        self.copy_bytes = self.copy_bytes.max(bytes);
        Ok(())
    }

    /// Frees the body, which has been sent or never will be.
    pub(crate) fn release_body(&mut self) {
        self.plane.body_memory.give_back(std::mem::take(&mut self.held_bytes));
    }

    /// Ends the request: its last byte has been sent, or never will be.
    pub(crate) fn finish(&mut self, code: u16) {
        if self.finished {
            return;
        }
        self.finished = true;
        let generated = |route| self.progress.generated(route, self.record.prompt_tokens);
        let generated = self.record.route.map_or_else(Generated::default, generated);
        if let Some((placed, tokens)) = self.placed.take().zip(generated.output_tokens.filter(|_| code < 400)) {
            placed.lease.generated(tokens.count());
        }
        self.flow = None;
        let took = self.started.elapsed();
        let backend = self.backend.as_deref().map_or(NONE, |backend| backend.name.as_str());
        let Self { record, place, policy, .. } = &*self;
        let done = Done {
            backend,
            model: record.model_name(),
            route: record.route,
            place: *place,
            policy,
            code,
            took,
            trace: self.trace.as_ref().map(|trace| trace.id()),
            generated,
        };
        record.log(self.plane.backends.current.load().config.log.access, &done);
        self.plane.metrics.requests.done(&done);
        let generated = done.generated;
        if let Some(mut trace) = self.trace.take() {
            trace::generated(&mut trace, &generated);
            trace.finish(code);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.release_body();
        self.finish(CLIENT_CLOSED);
    }
}
