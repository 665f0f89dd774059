//! Groups of ranks over their unit's link: the ranks of a node, and the ranks across nodes that have one local index.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use smallvec::SmallVec;

use super::lockstep::{Exchange, Lockstep, UnitError, Wake, Waker, protocol};
use super::rows::INLINE_RANKS;
use super::wire::{self, MessageError};
use crate::nodes::NodeGrid;

/// The link of a unit whose ranks agree on their nodes; its clones and groups share it. Any two ranks must use the
/// groups that contain both of them in the same order.
pub struct UnitLink<L> {
    state: Arc<Mutex<State<L>>>,
    grid: NodeGrid,
    rank: usize,
    waker: Waker,
}

struct State<L> {
    link: L,
    sent: LevelBytes,
}

/// Bytes of messages, excluding the transport's overhead.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LevelBytes {
    /// Bytes sent to other ranks on this rank's node.
    pub inside: u64,
    /// Bytes sent to ranks on other nodes.
    pub between: u64,
}

impl<L> Clone for UnitLink<L> {
    fn clone(&self) -> Self {
        Self { state: Arc::clone(&self.state), grid: self.grid, rank: self.rank, waker: self.waker.clone() }
    }
}

impl<L: Lockstep> UnitLink<L> {
    /// Divides a unit's ranks into nodes; all ranks call this at the same time.
    ///
    /// # Errors
    /// If the ranks do not split evenly over the nodes, a rank divides the unit differently or not at all, or a rank
    /// was lost.
    pub fn join(mut link: L, nodes: usize) -> Result<Self, UnitError> {
        let (rank, world) = (link.rank(), link.world());
        let grid =
            NodeGrid::new(world, nodes).map_err(|error| UnitError::Operands { rank, detail: error.to_string() })?;
        let mut own = Vec::new();
        wire::put(&MARK, &mut own);
        wire::put(&[nodes as u32], &mut own);
        let mut incoming = vec![Vec::new(); world];
        link.all_to_all(&vec![own.clone(); world], &mut incoming)?;
        for (peer, found) in incoming.iter().enumerate().filter(|(peer, _)| *peer != rank) {
            check_nodes(found, nodes).map_err(protocol(peer))?;
        }
        let waker = link.waker();
        let state = Arc::new(Mutex::new(State { link, sent: LevelBytes::default() }));
        Ok(Self { state, grid, rank, waker })
    }

    /// Returns the group of this rank's node; ranks in the group are local indices.
    pub fn inside(&self) -> GroupLink<L> {
        let members = self.grid.inside(self.grid.node(self.rank)).collect();
        GroupLink { unit: self.clone(), members, me: self.grid.local(self.rank) }
    }

    /// Returns the group of ranks across nodes that have this rank's local index; ranks in the group are nodes.
    pub fn across(&self) -> GroupLink<L> {
        let members = self.grid.across(self.grid.local(self.rank)).collect();
        GroupLink { unit: self.clone(), members, me: self.grid.node(self.rank) }
    }

    /// Returns the division of ranks into nodes.
    pub fn grid(&self) -> NodeGrid {
        self.grid
    }

    /// Returns the bytes that this rank has sent so far, in exchanges of the unit and its groups.
    pub fn sent(&self) -> LevelBytes {
        self.lock().sent
    }

    /// Ignores poisoning: a link in which a thread panicked fails by itself.
    fn lock(&self) -> MutexGuard<'_, State<L>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Prefix of the messages in which ranks agree on their nodes.
const MARK: [u8; 4] = *b"node";

fn check_nodes(message: &[u8], nodes: usize) -> Result<(), MessageError> {
    let Some((&MARK, found)) = message.split_first_chunk() else {
        return Err(MessageError::NoNodes(nodes));
    };
    let found: u32 = bytemuck::pod_read_unaligned(wire::exactly(found, size_of::<u32>())?);
    if found as usize == nodes { Ok(()) } else { Err(MessageError::Nodes { found, expected: nodes }) }
}

impl<L: Lockstep> Lockstep for UnitLink<L> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.grid.ranks()
    }

    fn group_all_to_all(&mut self, exchange: Exchange<'_>) -> Result<(), UnitError> {
        let mut state = self.lock();
        for (&peer, message) in exchange.peers.iter().zip(exchange.outgoing).filter(|(peer, _)| **peer != self.rank) {
            let is_inside = self.grid.node(peer) == self.grid.node(self.rank);
            let sent = if is_inside { &mut state.sent.inside } else { &mut state.sent.between };
            *sent += message.len() as u64;
        }
        state.link.group_all_to_all(exchange)
    }

    fn wait(&mut self) -> Result<Wake, UnitError> {
        self.lock().link.wait()
    }

    fn waker(&self) -> Waker {
        self.waker.clone()
    }
}

/// One rank's end of a group. Ranks are numbered within the group, but errors of the link use the unit's rank numbers.
pub struct GroupLink<L> {
    unit: UnitLink<L>,
    /// The unit's ranks in the group, ascending.
    pub(super) members: Arc<[usize]>,
    /// This rank's index among the members.
    me: usize,
}

impl<L: Lockstep> Lockstep for GroupLink<L> {
    fn rank(&self) -> usize {
        self.me
    }

    fn world(&self) -> usize {
        self.members.len()
    }

    fn group_all_to_all(&mut self, exchange: Exchange<'_>) -> Result<(), UnitError> {
        let peers: SmallVec<[usize; INLINE_RANKS]> = exchange.peers.iter().map(|&peer| self.members[peer]).collect();
        let Exchange { outgoing, incoming, arrived, .. } = exchange;
        self.unit.group_all_to_all(Exchange { peers: &peers, outgoing, incoming, arrived })
    }

    fn wait(&mut self) -> Result<Wake, UnitError> {
        self.unit.wait()
    }

    fn waker(&self) -> Waker {
        self.unit.waker()
    }
}
