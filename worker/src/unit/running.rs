//! A sequence that runs in the unit, owned by the request that wants its tokens.

use std::task::{Context, Poll};

use semmoe_tables::RankId;
use tokio::sync::mpsc;

use super::hub::{Lost, Unit};
use crate::engine::SequenceEvent;

/// A running sequence. Dropping it before its last event cancels it on its rank.
#[derive(Debug)]
pub(crate) struct Running {
    pub(super) id: u64,
    /// The rank that runs it.
    pub(crate) rank: RankId,
    pub(super) events: mpsc::UnboundedReceiver<SequenceEvent>,
    pub(super) unit: Unit,
    /// Whether the last event has arrived.
    pub(crate) ended: bool,
}

/// Why a sequence was refused, or ended without a last event.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SubmitError {
    /// A rank was lost.
    #[error("{}", .0.cause)]
    Dead(Lost),
    /// The unit is shutting down.
    #[error("the server is shutting down")]
    Stopping,
    /// The rank has reached its limit on sequences.
    #[error("rank {rank} runs and queues {limit} requests already, which is its limit")]
    Full {
        /// The rank.
        rank: RankId,
        /// Its limit.
        limit: usize,
    },
}

impl Running {
    /// The next event, or why there will be none.
    pub(crate) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Result<SequenceEvent, SubmitError>> {
        self.events.poll_recv(context).map(|event| match event {
            Some(event) => {
                self.ended = event.is_last();
                Ok(event)
            }
            None => {
                self.ended = true;
                Err(self.unit.lost().map_or(SubmitError::Stopping, SubmitError::Dead))
            }
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.ended {
            self.unit.abandon(self.id);
        }
    }
}
