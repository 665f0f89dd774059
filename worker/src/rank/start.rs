//! Transport, model and engine, once the unit has come together.

use std::net::TcpStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use semmoe_tables::RankId;

use super::error::WorkerError;
use super::prepare::Prepared;
use crate::engine::{Emit, Engine, EngineEnd, EngineHandle, EngineLimits, Inbox};
use crate::ep::{Counters, ExpertParallel, TcpTransport};
use crate::model::Model;
use crate::unit::Lost;

/// A rank that is connected but has no model yet. Orders can be sent already.
pub(super) struct Connected {
    rank: RankId,
    ep: ExpertParallel,
    inbox: Inbox,
    pub(super) handle: EngineHandle,
}

/// How an engine's thread ended.
#[derive(Debug)]
pub(super) enum Ended {
    /// As it was told to.
    By(EngineEnd),
    /// A rank failed: another, or this one by a panic.
    Lost(Lost),
}

/// Takes over the data links.
pub(super) fn connect(
    rank: RankId,
    data: Vec<Option<TcpStream>>,
    prepared: &Prepared,
    collective_timeout: Duration,
) -> Result<Connected, WorkerError> {
    let transport =
        TcpTransport::new(rank, data, collective_timeout).map_err(|source| WorkerError::Runtime { source })?;
    let counters = Arc::new(Counters::new(prepared.model.num_moe_layers()));
    let ep = ExpertParallel::new(Box::new(transport), &prepared.placement, counters)
        .map_err(|error| WorkerError::Arguments { detail: error.to_string() })?;
    let (inbox, handle) = Inbox::new(ep.waker());
    Ok(Connected { rank, ep, inbox, handle })
}

impl Connected {
    /// Loads the model and starts the engine on its own thread. The returned handle keeps the transport open: peers may
    /// still be finishing a step when this rank has left its loop.
    pub(super) fn start(
        self,
        prepared: &Prepared,
        limits: EngineLimits,
        emit: Emit,
        ended: impl FnOnce(Ended) + Send + 'static,
    ) -> Result<JoinHandle<Engine>, WorkerError> {
        let rank = self.rank;
        let model = Model::load(&prepared.model_dir, rank, &prepared.placement)?;
        let mut engine = Engine::new(model, self.ep, Arc::clone(&prepared.tokenizer), limits, self.inbox, emit);
        let work = move || {
            // A panic is a bug; the unit should still be told which rank it was.
            ended(match catch_unwind(AssertUnwindSafe(|| engine.run())) {
                Ok(Ok(end)) => Ended::By(end),
                Ok(Err(error)) => Ended::Lost(Lost { rank: error.rank(), cause: error.to_string() }),
                Err(_) => Ended::Lost(Lost { rank, cause: format!("rank {rank} was lost: its engine panicked") }),
            });
            engine
        };
        std::thread::Builder::new()
            .name(format!("rank-{rank}"))
            .spawn(work)
            .map_err(|source| WorkerError::Runtime { source })
    }
}
