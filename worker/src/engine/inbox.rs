//! Orders to the engine from other threads.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::control::message::ToRank;
use crate::ep::Waker;
use crate::threads::lock;

/// A queue of orders to which other threads add without blocking on the engine. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Inbox {
    orders: Arc<Orders>,
    waker: Waker,
}

/// Orders that the engine has not taken, oldest first.
#[derive(Debug, Default)]
struct Orders {
    waiting: Mutex<Vec<ToRank>>,
    came: Condvar,
}

impl Inbox {
    pub(crate) fn new(waker: Waker) -> Self {
        Self { orders: Arc::default(), waker }
    }

    /// Takes all queued orders, oldest first.
    pub(crate) fn take(&self) -> Vec<ToRank> {
        std::mem::take(&mut *lock(&self.orders.waiting))
    }

    /// Takes all queued orders, oldest first; waits until there is one.
    pub(super) fn wait(&self) -> Vec<ToRank> {
        let empty = |orders: &mut Vec<ToRank>| orders.is_empty();
        let waited = self.orders.came.wait_while(lock(&self.orders.waiting), empty);
        std::mem::take(&mut *waited.unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether this order is queued.
    pub(super) fn holds(&self, order: &ToRank) -> bool {
        lock(&self.orders.waiting).contains(order)
    }

    /// Queues an order and wakes the engine if it sleeps.
    pub(crate) fn send(&self, order: ToRank) {
        lock(&self.orders.waiting).push(order);
        self.orders.came.notify_one();
        self.waker.ring();
    }
}
