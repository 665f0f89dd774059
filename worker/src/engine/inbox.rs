//! Orders for the engine from other threads.

use std::sync::{Arc, Mutex, PoisonError};

use crate::control::message::ToRank;
use crate::ep::Waker;

/// The engine's end.
#[derive(Debug)]
pub(crate) struct Inbox {
    orders: Arc<Mutex<Vec<ToRank>>>,
}

/// Everybody else's end: never blocks on the engine's work.
#[derive(Clone, Debug)]
pub(crate) struct EngineHandle {
    orders: Arc<Mutex<Vec<ToRank>>>,
    waker: Waker,
}

impl Inbox {
    /// An inbox and the handle that fills it.
    pub(crate) fn new(waker: Waker) -> (Self, EngineHandle) {
        let orders = Arc::new(Mutex::new(Vec::new()));
        (Self { orders: Arc::clone(&orders) }, EngineHandle { orders, waker })
    }

    /// All orders since the last call, oldest first.
    pub(crate) fn take(&self) -> Vec<ToRank> {
        std::mem::take(&mut *self.orders.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether this order has come and was not taken yet.
    pub(super) fn holds(&self, order: &ToRank) -> bool {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner).contains(order)
    }
}

impl EngineHandle {
    /// Hands an order over and wakes the engine if it sleeps.
    pub(crate) fn send(&self, order: ToRank) {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner).push(order);
        self.waker.ring();
    }
}
