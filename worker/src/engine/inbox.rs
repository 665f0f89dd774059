//! Orders for the engine from other threads.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::control::message::ToRank;
use crate::ep::Waker;
use crate::threads::lock;

/// The engine's end.
#[derive(Debug)]
pub(crate) struct Inbox {
    orders: Arc<Orders>,
}

/// Orders that the engine has not taken, oldest first.
#[derive(Debug, Default)]
struct Orders {
    waiting: Mutex<Vec<ToRank>>,
    came: Condvar,
}

/// The other threads' end: never blocks on the engine's work.
#[derive(Clone, Debug)]
pub(crate) struct EngineHandle {
    orders: Arc<Orders>,
    waker: Waker,
}

impl Inbox {
    /// An inbox and the handle that fills it.
    pub(crate) fn new(waker: Waker) -> (Self, EngineHandle) {
        let orders = Arc::new(Orders::default());
        (Self { orders: Arc::clone(&orders) }, EngineHandle { orders, waker })
    }

    /// All orders since the last call, oldest first.
    pub(crate) fn take(&self) -> Vec<ToRank> {
        std::mem::take(&mut *lock(&self.orders.waiting))
    }

    /// The same, but waits until there is one.
    pub(super) fn wait(&self) -> Vec<ToRank> {
        let empty = |orders: &mut Vec<ToRank>| orders.is_empty();
        let waited = self.orders.came.wait_while(lock(&self.orders.waiting), empty);
        std::mem::take(&mut *waited.unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether this order has come and was not taken yet.
    pub(super) fn holds(&self, order: &ToRank) -> bool {
        lock(&self.orders.waiting).contains(order)
    }
}

impl EngineHandle {
    /// Hands an order over and wakes the engine if it sleeps.
    pub(crate) fn send(&self, order: ToRank) {
        lock(&self.orders.waiting).push(order);
        self.orders.came.notify_one();
        self.waker.ring();
    }
}
