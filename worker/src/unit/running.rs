//! A sequence running in the unit, owned by the request that consumes its tokens.

use std::task::{Context, Poll};

use semmoe_tables::RankId;
use tokio::sync::mpsc;

use super::hub::{Lost, Unit};
use crate::engine::SequenceEvent;

/// A running sequence. Dropping it before its last event cancels the sequence on its rank.
#[derive(Debug)]
pub(crate) struct Running {
    pub(super) id: u64,
    /// The rank that runs the sequence.
    pub(crate) rank: RankId,
    pub(super) events: mpsc::UnboundedReceiver<SequenceEvent>,
    pub(super) unit: Unit,
    /// Whether the last event has arrived.
    pub(crate) ended: bool,
}

/// The reason that a sequence was rejected, or ended without a last event.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SubmitError {
    /// A rank was lost.
    #[error("{}", .0.cause)]
    Dead(Lost),
    /// The unit is shutting down.
    #[error("the server is shutting down")]
    Stopping,
    /// The rank has reached its sequence limit.
    #[error("rank {rank} already has {limit} running and queued requests, which is its limit")]
    Full {
        /// The rank.
        rank: RankId,
        /// Its limit.
        limit: usize,
    },
}

impl Running {
    /// Polls for the next event; returns the error if there will be none.
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
