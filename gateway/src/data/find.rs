//! Finds a place for a request, immediately or after a wait in its model's queue.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::place::place;
use super::{DataPlane, Job, Placed};
use crate::backends::{Nowhere, Refused, RequestError, Room};

/// The events that a request may wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// Room on a rank, or any backend at all.
    ForAll,
    /// Room only, because an earlier attempt already left an error or an engine's response to return.
    ForRoom,
}

/// The outcome of the search for a place.
pub(crate) enum Found {
    Placed(Placed),
    /// No place, but the model's backends have changed. Only for [`Patience::ForAll`].
    Moved,
}

/// Places a request on a backend outside `except`.
pub(crate) async fn find(
    plane: &Arc<DataPlane>,
    job: &Job,
    except: &[usize],
    patience: Patience,
) -> Result<Found, RequestError> {
    let (queue, mut rules) = (&job.model.queue, job.snapshot.config.queue);
    if patience == Patience::ForRoom {
        rules.wait_for_backend = Duration::ZERO;
    }
    if rules.max_in_flight.is_none() {
        match place(plane, job, except) {
            Err(RequestError::NoBackend { .. }) if !rules.wait_for_backend.is_zero() => {}
            found => return found.map(Found::Placed),
        }
    }
    let began = Instant::now();
    let mut none = None;
    let found = queue.enter(&rules, job.priority.unwrap_or(0), || match place(plane, job, except) {
        Ok(mut placed) => {
            placed.lease.room = rules.max_in_flight.map(|_| Room::new(queue));
            placed.waited = began.elapsed();
            Ok(Ok(Found::Placed(placed)))
        }
        // Waiting requests are woken when backends join or leave.
        Err(RequestError::NoBackend { .. }) if patience == Patience::ForAll && job.has_moved(plane) => {
            Ok(Ok(Found::Moved))
        }
        Err(error @ RequestError::NoBackend { .. }) => {
            none = Some(error);
            // A retry stays in the pool of its first attempt. If that pool has been replaced, its ranks may never open
            // again.
            let may_wait = rules.max_in_flight.is_some() && job.has_other(except) && !job.has_moved(plane);
            Err(if may_wait { Nowhere::Full } else { Nowhere::Gone })
        }
        // Waiting would not help.
        Err(error) => Ok(Err(error)),
    });
    let refused = match found.await {
        Ok(placed) => return placed,
        Err(refused) => refused,
    };
    let model = &job.model.name;
    if patience == Patience::ForAll {
        plane.metrics.faults.shed(model, refused.reason());
    }
    Err(match (refused, none) {
        (Refused::Gone, Some(error)) => error,
        (Refused::TooLong, _) => {
            RequestError::QueueTimeout { model: model.clone(), seconds: rules.max_wait.as_secs_f64() }
        }
        (Refused::TooMany | Refused::Gone, _) => {
            RequestError::QueueFull { model: model.clone(), waiting: rules.max_queued }
        }
    })
}
