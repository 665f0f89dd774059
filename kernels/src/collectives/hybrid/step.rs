//! One step of a fused exchange: messages inside the node and between nodes, in flight at the same time.

use super::stage::{Stage, StageObserver};
use crate::collectives::{Exchange, Lockstep, UnitError};

/// The messages of a step; the next step reuses the buffers.
#[derive(Debug, Default)]
pub(super) struct Step {
    peers: Vec<usize>,
    /// `[peers]`: the stage that each peer's message belongs to.
    stages: Vec<Stage>,
    outgoing: Vec<Vec<u8>>,
    incoming: Vec<Vec<u8>>,
}

impl Step {
    pub(super) fn begin(&mut self) {
        self.peers.clear();
        self.stages.clear();
    }

    /// Adds a peer and returns the empty message to it. The peers of one stage must be consecutive.
    pub(super) fn add(&mut self, peer: usize, stage: Stage) -> &mut Vec<u8> {
        self.peers.push(peer);
        self.stages.push(stage);
        let count = self.peers.len();
        if self.outgoing.len() < count {
            self.outgoing.resize_with(count, Vec::new);
            self.incoming.resize_with(count, Vec::new);
        }
        let message = &mut self.outgoing[count - 1];
        message.clear();
        message
    }

    /// Adds a peer to send to and one to receive from, possibly the same, and returns the message to the former.
    pub(super) fn add_pair(&mut self, to: usize, from: usize, stage: Stage) -> &mut Vec<u8> {
        self.add(to, stage);
        let at = self.peers.len() - 1;
        if from != to {
            self.add(from, stage);
        }
        &mut self.outgoing[at]
    }

    /// Exchanges with all peers of the step.
    pub(super) fn exchange(
        &mut self,
        link: &mut impl Lockstep,
        observer: &mut dyn StageObserver,
    ) -> Result<(), UnitError> {
        let Self { peers, stages, outgoing, incoming } = self;
        let count = peers.len();
        stages.chunk_by(PartialEq::eq).for_each(|of_stage| observer.began(of_stage[0]));
        let mut open = stages.clone();
        let mut arrived = |i: usize| {
            let stage = stages[i];
            if let Some(at) = open.iter().position(|&other| other == stage) {
                open.swap_remove(at);
            }
            if !open.contains(&stage) {
                observer.ended(stage);
            }
        };
        link.group_all_to_all(Exchange {
            peers,
            outgoing: &outgoing[..count],
            incoming: &mut incoming[..count],
            arrived: &mut arrived,
        })
    }

    /// Returns the message from a peer; empty if the peer is not part of this step.
    pub(super) fn from(&self, peer: usize) -> &[u8] {
        self.peers.iter().position(|&other| other == peer).map_or(&[], |i| &self.incoming[i])
    }
}
