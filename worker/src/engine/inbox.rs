//! Commands to the engine from other threads.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::control::message::ToRank;
use crate::ep::Waker;
use crate::threads::lock;

/// A command queue to which other threads can add without waiting for the engine. Clones share the queue.
#[derive(Clone, Debug)]
pub(crate) struct Inbox {
    orders: Arc<Orders>,
    waker: Waker,
}

/// Pending commands, oldest first.
#[derive(Debug, Default)]
struct Orders {
    waiting: Mutex<Vec<ToRank>>,
    came: Condvar,
}

impl Inbox {
    pub(crate) fn new(waker: Waker) -> Self {
        Self { orders: Arc::default(), waker }
    }

    /// Removes and returns all queued commands, oldest first.
    pub(crate) fn take(&self) -> Vec<ToRank> {
        std::mem::take(&mut *lock(&self.orders.waiting))
    }

    /// Waits for a command, then removes and returns all queued commands, oldest first.
    pub(super) fn wait(&self) -> Vec<ToRank> {
        let empty = |orders: &mut Vec<ToRank>| orders.is_empty();
        let waited = self.orders.came.wait_while(lock(&self.orders.waiting), empty);
        std::mem::take(&mut *waited.unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether this command is queued.
    pub(super) fn holds(&self, order: &ToRank) -> bool {
        lock(&self.orders.waiting).contains(order)
    }

    /// Queues a command and wakes the engine if it is asleep.
    pub(crate) fn send(&self, order: ToRank) {
        lock(&self.orders.waiting).push(order);
        self.orders.came.notify_one();
        self.waker.ring();
    }
}
