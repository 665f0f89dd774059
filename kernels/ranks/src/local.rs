//! Messages and barriers between threads of one process, implemented as simple queues under a lock.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use semmoe_kernels::collectives::{Exchange, Lockstep, UnitError, Wake, Waker};

/// One rank's end of an in-process mesh. Dropping it ends the rank, which the others detect.
pub struct LocalTransport {
    rank: usize,
    mesh: Arc<Mesh>,
}

struct Mesh {
    world: usize,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// `[to][from]`: messages in flight.
    queues: Vec<Vec<VecDeque<Vec<u8>>>>,
    rung: Vec<bool>,
    /// The first rank that disappeared.
    lost: Option<usize>,
    /// Buffers for the next messages.
    spare: Vec<Vec<u8>>,
}

impl LocalTransport {
    /// Creates all ends of a mesh of `world` ranks, in rank order.
    #[must_use]
    pub fn mesh(world: usize) -> Vec<Self> {
        let state = State {
            queues: vec![vec![VecDeque::new(); world]; world],
            rung: vec![false; world],
            lost: None,
            spare: Vec::new(),
        };
        let mesh = Arc::new(Mesh { world, state: Mutex::new(state), changed: Condvar::new() });
        (0..world).map(|rank| Self { rank, mesh: Arc::clone(&mesh) }).collect()
    }

    fn send(&self, peers: &[usize], outgoing: &[Vec<u8>]) {
        let mut state = self.mesh.lock();
        for (&peer, message) in peers.iter().zip(outgoing) {
            if peer != self.rank {
                let mut carried = state.spare.pop().unwrap_or_default();
                carried.clear();
                carried.extend_from_slice(message);
                state.queues[peer][self.rank].push_back(carried);
            }
        }
        self.mesh.changed.notify_all();
    }
}

impl Mesh {
    /// Ignores poisoning: state changes by entire messages, so a thread that panicked under the lock left it
    /// consistent.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sleep<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn check_lost(&self) -> Result<(), UnitError> {
        match self.lost {
            Some(rank) => Err(UnitError::lost(rank, "its end of the mesh was dropped")),
            None => Ok(()),
        }
    }
}

impl Lockstep for LocalTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.mesh.world
    }

    fn group_all_to_all(&mut self, exchange: Exchange<'_>) -> Result<(), UnitError> {
        let Exchange { peers, outgoing, incoming, arrived } = exchange;
        self.send(peers, outgoing);
        let mut state = self.mesh.lock();
        for (i, (&peer, to)) in peers.iter().zip(incoming).enumerate() {
            if peer == self.rank {
                continue;
            }
            // A message sent before its sender died still counts, as it would on a network.
            let message = loop {
                if let Some(message) = state.queues[self.rank][peer].pop_front() {
                    break message;
                }
                state.check_lost()?;
                state = self.mesh.sleep(state);
            };
            state.spare.push(std::mem::replace(to, message));
            arrived(i);
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<Wake, UnitError> {
        let mut state = self.mesh.lock();
        loop {
            state.check_lost()?;
            if std::mem::take(&mut state.rung[self.rank]) {
                return Ok(Wake::Local);
            }
            if state.queues[self.rank].iter().any(|queue| !queue.is_empty()) {
                return Ok(Wake::Peer);
            }
            state = self.mesh.sleep(state);
        }
    }

    fn waker(&self) -> Waker {
        let (mesh, rank) = (Arc::clone(&self.mesh), self.rank);
        Waker::new(move || {
            mesh.lock().rung[rank] = true;
            mesh.changed.notify_all();
        })
    }
}

impl Drop for LocalTransport {
    fn drop(&mut self) {
        self.mesh.lock().lost.get_or_insert(self.rank);
        self.mesh.changed.notify_all();
    }
}
