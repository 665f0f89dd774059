//! The resources that a request holds while it runs.

use std::sync::Arc;

use prometheus_client::metrics::gauge::Gauge;
use semmoe_routing::{Router, Work};
use semmoe_tables::RankId;

use super::Pool;
use crate::availability::Trial;
use crate::queue::Room;

/// A request that is counted in; dropping it counts it out, exactly once, however the request ends.
pub(crate) struct Lease {
    /// Index of the backend in its model.
    pub(crate) backend: usize,
    /// The rank it was placed on; `None` where the engine chooses.
    pub(crate) rank: Option<RankId>,
    inflight: Gauge,
    counted: Option<Counted>,
    /// Of a backend whose breaker is half open.
    pub(crate) trial: Option<Trial>,
    /// Offered to waiting requests once this is counted out: fields are dropped after [`Drop::drop`].
    pub(crate) room: Option<Room>,
}

pub(super) struct Counted {
    pub(super) pool: Arc<Pool>,
    pub(super) real: Charge,
    /// Where a watched policy would have it.
    pub(super) ghost: Option<Charge>,
}

/// A request's work on one slot of a router.
pub(super) struct Charge {
    pub(super) slot: u16,
    pub(super) work: Work,
    /// Blocks of the prompt that the rank is believed to hold only since this request.
    pub(super) new_blocks: usize,
}

impl Lease {
    pub(super) fn new(backend: usize, rank: Option<RankId>, inflight: Gauge, counted: Option<Counted>) -> Self {
        inflight.inc();
        Self { backend, rank, inflight, counted, trial: None, room: None }
    }

    /// The rank answered: its counts are reliable from now on.
    pub(crate) fn answered(&self) {
        for (router, charge) in self.charges() {
            router.accounts().answered(charge.slot);
        }
    }

    /// The first piece of an answer is there, so the prompt has been computed.
    pub(crate) fn computed(&mut self) {
        if let Some(Counted { pool, real, ghost }) = &mut self.counted {
            pool.router.accounts().computed(real.slot, &mut real.work);
            if let Some((shadow, ghost)) = pool.shadow.as_ref().zip(ghost.as_mut()) {
                shadow.router.accounts().computed(ghost.slot, &mut ghost.work);
            }
        }
    }

    /// The engine refused the request: its rank neither computed nor holds the prompt with these blocks.
    pub(crate) fn refused(&self, blocks: &[u64]) {
        for (router, charge) in self.charges() {
            router.take_back(charge.slot, charge.work, blocks, charge.new_blocks);
        }
    }

    /// Where this request is charged: with the router that placed it, and with a watched policy's.
    fn charges(&self) -> impl Iterator<Item = (&Router, &Charge)> {
        self.counted.iter().flat_map(|Counted { pool, real, ghost }| {
            let shadow = pool.shadow.as_ref().zip(ghost.as_ref()).map(|(shadow, ghost)| (&shadow.router, ghost));
            [(&pool.router, real)].into_iter().chain(shadow)
        })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        for (router, charge) in self.charges() {
            router.accounts().release(charge.slot, charge.work);
        }
        self.inflight.dec();
    }
}
