//! The resources that a running request holds.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use prometheus_client::metrics::gauge::Gauge;
use semmoe_routing::{Router, Work};
use semmoe_tables::RankId;

use super::{Pool, Slot};
use crate::backends::Room;

/// Number of consecutive refusals after which refused requests stay in a rank's recent load. Otherwise a rank that
/// refuses everything would look idle and attract every request.
const REFUSALS_FORGIVEN: u32 = 8;

/// A request in flight. Dropping the lease removes the request from the counts exactly once, however the request ends.
pub(crate) struct Lease {
    /// Index of the backend in its model.
    pub(crate) backend: usize,
    /// The rank that the policy chose, whether or not the request will run there.
    pub(crate) chosen: RankId,
    /// The rank that the request will run on; `None` if the engine chooses.
    pub(crate) rank: Option<RankId>,
    inflight: Gauge,
    refusals: Arc<AtomicU32>,
    counted: Option<Counted>,
    /// Offered to waiting requests once this request has been subtracted from the counts: fields are dropped after
    /// [`Drop::drop`].
    pub(crate) room: Option<Room>,
}

pub(super) struct Counted {
    pub(super) pool: Arc<Pool>,
    pub(super) real: Charge,
    /// Where a shadow policy would have placed the request.
    pub(super) ghost: Option<Charge>,
}

/// A request's work in one router.
pub(super) enum Charge {
    /// On one slot.
    Rank {
        slot: u16,
        work: Work,
        /// Number of prompt blocks that the rank is assumed to cache only because of this request.
        new_blocks: usize,
    },
    /// On several slots, with part of the request's tokens on each.
    Among { slots: Range<u16>, part: u64 },
}

impl Lease {
    pub(super) fn new(slot: &Slot, rank: Option<RankId>, inflight: Gauge, counted: Option<Counted>) -> Self {
        inflight.inc();
        let (backend, chosen, refusals) = (slot.backend, slot.rank, Arc::clone(&slot.refusals));
        Self { backend, chosen, rank, inflight, refusals, counted, room: None }
    }

    /// Records that the rank answered, so its counters are reliable from now on.
    pub(crate) fn answered(&self) {
        for (router, charge) in self.charges() {
            if let Charge::Rank { slot, .. } = charge {
                router.accounts().answered(*slot);
            }
        }
        // Most calls change nothing and leave the cache line shared.
        if self.refusals.load(Ordering::Relaxed) > 0 {
            self.refusals.store(0, Ordering::Relaxed);
        }
    }

    /// Records that the first response chunk arrived: the prompt has been computed.
    pub(crate) fn computed(&mut self) {
        self.update(|router, slot, work| router.accounts().computed(slot, work));
    }

    fn update(&mut self, change: impl Fn(&Router, u16, &mut Work) -> bool) {
        let Some(Counted { pool, real, ghost }) = &mut self.counted else { return };
        if let Charge::Rank { slot, work, .. } = real {
            change(&pool.router, *slot, work);
        }
        if let Some((shadow, Charge::Rank { slot, work, .. })) = pool.shadow.as_ref().zip(ghost.as_mut()) {
            change(&shadow.router, *slot, work);
        }
    }

    /// Records how many tokens the response contains so far.
    pub(crate) fn generates(&mut self, tokens: u64) {
        self.update(|router, slot, work| router.accounts().generates(slot, work, tokens));
    }

    /// Records that the response is complete, with this many tokens.
    pub(crate) fn generated(&self, tokens: u64) {
        self.charges().for_each(|(router, _)| router.accounts().generated(tokens));
    }

    /// Records that the engine refused the request: its rank neither computed nor cached the prompt with these blocks.
    pub(crate) fn refused(&self, blocks: &[u64]) {
        let forgiven = self.refusals.fetch_add(1, Ordering::Relaxed) < REFUSALS_FORGIVEN;
        for (router, charge) in self.charges() {
            let Charge::Rank { slot, work, new_blocks } = charge else { continue };
            if forgiven {
                router.take_back(*slot, *work, blocks, *new_blocks);
            } else if let Some(prefixes) = router.prefixes().filter(|_| *new_blocks > 0) {
                prefixes.take_back(*slot, blocks, *new_blocks);
            }
        }
    }

    /// Lists the routers that charge this request: the one that placed it, and the shadow's.
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
            match charge {
                Charge::Rank { slot, work, .. } => {
                    router.accounts().release(*slot, *work);
                }
                Charge::Among { slots, part } => router.accounts().release_among(slots.clone(), *part),
            }
        }
        self.inflight.dec();
    }
}
