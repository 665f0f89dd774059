//! A barrier: either all ranks arrive, or every rank learns which one did not.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::time::{Duration, Instant};

use semmoe_tables::RankId;

use crate::error::RankError;
use crate::signals::{ALIVE, GAVE_UP, LEFT, Signals};

/// Number of polls of a peer before a rank sleeps, if every rank can have its own core. An arrival is then detected in
/// well under a microsecond.
///
/// This is far more than the worker's transport polls (64, about the cost of a sleep), because ranks of a collective
/// arrive nearly together. With two ranks on two cores, a barrier took 0.2 to 0.4 times as long as with sleeping alone,
/// and 0.5 to 1.1 times with 64 polls. With more ranks than cores, polling only delays the others: 64 polls took 0.8 to
/// 1.05 times as long as no polls, 2000 polls two to seven times.
const SPINS: u32 = 2000;

/// One rank's end of the barrier.
#[derive(Debug)]
pub(crate) struct Barrier {
    rank: usize,
    epoch: u32,
    limit: Duration,
    spins: u32,
}

impl Barrier {
    pub(crate) fn new(rank: usize, world: usize, limit: Duration) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self { rank, epoch: 0, limit, spins: if cores >= world { SPINS } else { 0 } }
    }

    /// Enters the next epoch and waits until all other ranks have. Everything that any rank wrote before is then
    /// visible to all.
    pub(crate) fn pass(&mut self, all: &[&Signals]) -> Result<(), RankError> {
        self.epoch = self.epoch.wrapping_add(1);
        let own = all[self.rank];
        own.arrived.store(self.epoch, Release);
        own.bell.ring();
        let deadline = Instant::now() + self.limit;
        // Starts with the next rank, so that ranks do not all sleep on the same one.
        for step in 1..all.len() {
            let peer = (self.rank + step) % all.len();
            if let Err(error) = self.wait_for(peer, all[peer], deadline) {
                give_up(own, peer, &error);
                return Err(error);
            }
        }
        Ok(())
    }

    fn wait_for(&self, peer: usize, signals: &Signals, deadline: Instant) -> Result<(), RankError> {
        for _ in 0..self.spins {
            if self.has_arrived(signals) {
                return self.still_there(peer, signals, true);
            }
            std::hint::spin_loop();
        }
        self.sleep_until(peer, signals, deadline)
    }

    fn sleep_until(&self, peer: usize, signals: &Signals, deadline: Instant) -> Result<(), RankError> {
        let (rank, epoch) = (RankId::new(peer as u16), self.epoch);
        loop {
            // Reads the bell before the state it announces, so that no change is missed while sleeping.
            let rings = signals.bell.rings();
            let arrived = self.has_arrived(signals);
            self.still_there(peer, signals, arrived)?;
            if arrived {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(RankError::TimedOut { rank, epoch, limit: self.limit });
            }
            signals.bell.sleep(rings, Some(left));
        }
    }

    /// Fails if the peer can no longer arrive. A peer that left after arriving had finished. One that gave up will not
    /// use the group again, and no rank should continue with it.
    fn still_there(&self, peer: usize, signals: &Signals, arrived: bool) -> Result<(), RankError> {
        let (rank, epoch) = (RankId::new(peer as u16), self.epoch);
        match signals.state.load(SeqCst) {
            LEFT if !arrived && !self.has_arrived(signals) => Err(RankError::Left { rank, epoch }),
            // The peer gave up in a later epoch, so it has passed this one.
            GAVE_UP if signals.arrived.load(Acquire).wrapping_sub(self.epoch) as i32 > 0 => Ok(()),
            GAVE_UP => {
                let cause = RankId::new(signals.cause.load(Acquire) as u16);
                Err(RankError::GaveUp { rank, epoch, cause })
            }
            _ => Ok(()),
        }
    }

    /// Epochs wrap around, which is safe because a peer is at most one epoch ahead or behind.
    fn has_arrived(&self, signals: &Signals) -> bool {
        signals.arrived.load(Acquire).wrapping_sub(self.epoch) as i32 >= 0
    }
}

/// Announces that this rank has left.
pub(crate) fn leave(own: &Signals) {
    if own.state.compare_exchange(ALIVE, LEFT, SeqCst, Relaxed).is_ok() {
        own.bell.ring();
    }
}

fn give_up(own: &Signals, peer: usize, error: &RankError) {
    // Reports the rank that was late first, not the one that reported it.
    let cause = match error {
        RankError::GaveUp { cause, .. } => cause.index(),
        _ => peer,
    };
    own.cause.store(cause as u32, Release);
    own.state.store(GAVE_UP, SeqCst);
    own.bell.ring();
}
