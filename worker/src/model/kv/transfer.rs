//! Transfers pages between ranks, in rounds of bounded size and with a checksum for each piece. A page's routes are
//! sent along with it; with tp every rank receives them.

use std::collections::BTreeMap;

use semmoe_kernels::reshard::PieceHash;
use semmoe_kernels::reshard::kv::{KvMove, KvPlan};

use super::page::Page;
use super::switch::KvSpan;
use crate::ep::{ExpertParallel, UnitError};
use crate::model::switch::{Obstacle, ROUND_BYTES};

/// A phase of an attention switch in which a rank may object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvPhase {
    /// No data has been sent yet.
    Planning,
    /// A round of pages is about to be sent.
    Moving {
        /// Number of rounds already completed.
        round: usize,
    },
    /// All pages have arrived.
    Checking,
}

/// A callback that returns this rank's reason for refusing to continue, or `None` to continue.
pub type KvObjection<'a> = &'a mut dyn FnMut(KvPhase) -> Option<String>;

/// A plan as seen by the rank that executes it.
#[derive(Debug)]
pub(super) struct PlannedMoves {
    pub(super) plan: KvPlan,
    pub(super) span: KvSpan,
    /// Number of experts per token, over all layers.
    pub(super) route_width: usize,
    /// Whether all ranks of a group store identical page contents.
    pub(super) alike: bool,
    /// This rank's index in the span.
    pub(super) me: usize,
    /// Whether keys and values are stored on a GPU, so that only routes are sent.
    pub(super) elsewhere: bool,
}

impl PlannedMoves {
    /// Adds to the digest the parts of an arrived page that must be equal on all ranks that share a pool: its routes
    /// and latent vectors.
    pub(super) fn add_to(&self, digest: &mut PieceHash, page: &Page) {
        if self.span.merges() {
            digest.update(bytemuck::cast_slice(&page.routes));
            if self.alike {
                digest.update(page.bytes());
            }
        }
    }
}

/// One rank's part in executing some of a plan's moves.
pub(super) struct Transfer<'a> {
    pub(super) planned: &'a PlannedMoves,
    /// Pages of the old pool, in the order of its description.
    pub(super) sources: Vec<&'a Page>,
    /// Moves, indexed by receiving rank.
    pub(super) moves: Vec<Vec<KvMove>>,
    /// The new pages that this rank's moves will fill.
    pub(super) memory: BTreeMap<u32, Page>,
}

impl Transfer<'_> {
    /// Fills the new pages, or returns the obstacle that prevents this. A rank that objects still takes part, with
    /// empty messages.
    pub(super) fn run(
        &mut self,
        ep: &mut ExpertParallel,
        objection: KvObjection<'_>,
    ) -> Result<Option<Obstacle>, UnitError> {
        self.copy_own();
        let largest = self.moves.iter().flatten().map(|piece| piece.rows * piece.bytes).max().unwrap_or(1);
        let size = (ROUND_BYTES / largest.max(1)).max(1);
        let mut obstacle = None;
        for round in 0..self.rounds(size) {
            obstacle = obstacle.or_else(|| objection(KvPhase::Moving { round }).map(Obstacle::Own));
            let outgoing = (0..self.moves.len()).map(|to| match (&obstacle, to == self.planned.me) {
                (None, false) => self.message(to, round, size),
                _ => Vec::new(),
            });
            let outgoing: Vec<_> = outgoing.collect();
            let incoming = ep.exchange_among(self.planned.span.ranks.clone(), &outgoing)?;
            for (from, message) in incoming.into_iter().enumerate() {
                if obstacle.is_none() && from != self.planned.me {
                    obstacle = self.take(from, &message, round, size).err();
                }
            }
        }
        Ok(obstacle.or_else(|| objection(KvPhase::Checking).map(Obstacle::Own)))
    }

    /// Number of rounds of `size` pieces that the pair of ranks with the most pieces needs.
    fn rounds(&self, size: usize) -> usize {
        let ranks = self.moves.len();
        let mut between = vec![0_usize; ranks * ranks];
        for (to, moves) in self.moves.iter().enumerate() {
            moves
                .iter()
                .filter(|piece| piece.from.rank != to)
                .for_each(|piece| between[piece.from.rank * ranks + to] += 1);
        }
        between.into_iter().max().unwrap_or(0).div_ceil(size)
    }

    /// Fills new pages from this rank's own old pages.
    fn copy_own(&mut self) {
        let PlannedMoves { plan, route_width, me, .. } = self.planned;
        for (&id, page) in &mut self.memory {
            let source = plan.pool(*me).sources[id as usize];
            if plan.had(*me, source) {
                page.push_routes(&self.sources[source.page as usize].routes, *route_width);
            }
        }
        for piece in self.moves[self.planned.me].iter().filter(|piece| piece.from.rank == self.planned.me) {
            let from = self.sources[piece.from.page as usize].bytes();
            let to = new_page(&mut self.memory, piece).bytes_mut();
            for row in 0..piece.rows {
                to[piece.to_offset + row * piece.to_stride..][..piece.bytes]
                    .copy_from_slice(&from[piece.from_offset + row * piece.from_stride..][..piece.bytes]);
            }
        }
    }

    /// Returns the pieces that one rank sends another in one round.
    fn pieces(&self, from: usize, to: usize, round: usize, size: usize) -> Vec<KvMove> {
        let pieces = self.moves[to].iter().filter(|piece| piece.from.rank == from).copied();
        pieces.skip(round * size).take(size).collect()
    }

    fn message(&self, to: usize, round: usize, size: usize) -> Vec<u8> {
        let mut message = Vec::new();
        for piece in self.pieces(self.planned.me, to, round, size) {
            let (page, begin) = (self.sources[piece.from.page as usize], message.len());
            for row in 0..piece.rows {
                message.extend_from_slice(&page.bytes()[piece.from_offset + row * piece.from_stride..][..piece.bytes]);
            }
            if !self.planned.plan.had(to, piece.from) {
                page.routes.iter().for_each(|route| message.extend_from_slice(&route.to_le_bytes()));
            }
            let checksum = hash(&message[begin..]);
            message.extend_from_slice(&checksum.to_le_bytes());
        }
        message
    }

    fn take(&mut self, from: usize, mut message: &[u8], round: usize, size: usize) -> Result<(), Obstacle> {
        let broken = |page: u32, what: &str| {
            Obstacle::Own(format!("KV cache page {page} from rank {} {what}", self.planned.span.ranks.start + from))
        };
        for piece in self.pieces(from, self.planned.me, round, size) {
            if message.is_empty() {
                return Err(Obstacle::Peer(self.planned.span.ranks.start + from));
            }
            let tokens = self.planned.plan.pool(self.planned.me).pool.pages[piece.page as usize].tokens.len();
            let knows = self.planned.plan.had(self.planned.me, piece.from);
            let routes = if knows { 0 } else { tokens * self.planned.route_width };
            let data = piece.rows * piece.bytes;
            let Some((body, rest)) = message.split_at_checked(data + 2 * routes) else {
                return Err(broken(piece.page, "is truncated"));
            };
            let Some((checksum, rest)) = rest.split_first_chunk() else {
                return Err(broken(piece.page, "has no checksum"));
            };
            if hash(body) != u64::from_le_bytes(*checksum) {
                return Err(broken(piece.page, "does not match its checksum"));
            }
            let (data, body) = body.split_at(data);
            let page = new_page(&mut self.memory, &piece);
            for (row, bytes) in data.chunks_exact(piece.bytes).enumerate() {
                page.bytes_mut()[piece.to_offset + row * piece.to_stride..][..piece.bytes].copy_from_slice(bytes);
            }
            let routes: Vec<u16> = body.as_chunks().0.iter().map(|route| u16::from_le_bytes(*route)).collect();
            page.push_routes(&routes, self.planned.route_width);
            message = rest;
        }
        match message {
            [] => Ok(()),
            _ => {
                let rank = self.planned.span.ranks.start + from;
                Err(Obstacle::Own(format!("rank {rank} sent {} bytes beyond the end of its pages", message.len())))
            }
        }
    }
}

fn new_page<'a>(memory: &'a mut BTreeMap<u32, Page>, piece: &KvMove) -> &'a mut Page {
    memory.get_mut(&piece.page).expect("memory is allocated for every page that moves")
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hash = PieceHash::default();
    hash.update(bytes);
    hash.finish()
}
