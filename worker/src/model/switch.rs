//! Experts move between ranks: from one spread to another, layer by layer, or back.
//!
//! All ranks do it together, between two steps. A layer's parts travel in rounds of bounded size; every rank checks what it got,
//! then all vote, and only if no rank objects do they replace what they had. So at any time a layer is in one spread on all
//! ranks. If a rank objects, the layers that were replaced go back in inverse order, by the same moves from the new spread to
//! the old one. What a rank needs beyond its experts is one layer's new experts and messages of [`ROUND_BYTES`] to and from each
//! rank.

use std::time::Instant;

use semmoe_tables::{ExpertId, GroupId, LayerIdx, RankId};
use serde::{Deserialize, Serialize};

use super::expert::{BadExpert, Expert};
use super::moves::{self, Part, Round, Transfer};
use super::slice::ExpertSlice;
use super::weights::{FeedForward, Moe};
use super::{Model, ModelConfig, ModelError, check_placement};
use crate::ep::{ExpertLayout, ExpertParallel, ExpertSpread, MAX_MESSAGE_BYTES, UnitError};

/// Bytes that a rank sends another in one collective, unless a single expert has more.
const ROUND_BYTES: usize = 32 << 20;

/// How a change of spread ended: on all ranks alike.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum SwitchOutcome {
    /// The experts are where they should be.
    Committed,
    /// They are where they were.
    RolledBack {
        /// Who objected, and why.
        cause: String,
    },
}

/// Why a rank will not go on with a switch, asked before each layer; none if it will.
pub type Objection<'a> = &'a mut dyn FnMut(LayerIdx) -> Option<String>;

impl Model {
    /// Whether a spread fits this model and its unit.
    ///
    /// # Errors
    /// As [`Model::load_experts`]; an expert that does not fit a message.
    pub fn check_spread(&self, to: &ExpertSpread, ep: &ExpertParallel) -> Result<(), ModelError> {
        for layout in [ep.spread().layout, to.layout] {
            if let ExpertLayout::Hybrid(_) = layout {
                return Err(ModelError::FixedLayout { layout });
            }
        }
        check_placement(&self.config, GroupId::new(ep.rank().get()), &to.copies)?;
        let world = ep.world();
        for (field, found) in [("groups", to.copies.groups().into()), ("places", to.copies.places())] {
            if found != world {
                return Err(ModelError::Placement { field, found, of: "unit", expected: world });
            }
        }
        ExpertSlice::new(&self.config, to.layout, ep.rank().index(), world)?;
        let bytes = Expert::max_bytes(self.config.hidden, self.config.expert_width);
        match bytes <= MAX_MESSAGE_BYTES {
            true => Ok(()),
            false => Err(ModelError::ExpertBytes { bytes, limit: MAX_MESSAGE_BYTES }),
        }
    }

    /// Bytes that this rank needs beyond those that it has while the experts move to a spread: one layer's new experts and the messages of
    /// a round, and the slots that it then has more, if any. Weights count as f32 unless they are known to be bf16.
    pub(crate) fn switch_bytes(&self, to: &ExpertSpread, ep: &ExpertParallel) -> usize {
        let ModelConfig { hidden, expert_width, .. } = self.config;
        let parts = |spread: &ExpertSpread| if spread.layout == ExpertLayout::Tp { ep.world() } else { 1 };
        let experts = self.weights.blocks.iter().filter_map(|block| match &block.feed_forward {
            FeedForward::Moe(moe) => moe.experts.first(),
            FeedForward::Dense(_) => None,
        });
        // A bf16 panel is half an f32 one.
        let halved = if experts.clone().next().is_some() && experts.into_iter().all(Expert::is_bf16) { 2 } else { 1 };
        let layer_bytes = |spread: &ExpertSpread, layer: LayerIdx| {
            let each = Expert::max_bytes(hidden, expert_width / parts(spread)) / halved;
            spread.experts_of(ep.rank(), layer).count() * each
        };
        let layers = || (0..to.copies.layers()).map(|layer| LayerIdx::new(layer as u16));
        let largest = layers().map(|layer| layer_bytes(to, layer)).max().unwrap_or(0);
        let more = layers().map(|layer| layer_bytes(to, layer).saturating_sub(layer_bytes(ep.spread(), layer)));
        let messages = 2 * (ep.world() - 1) * ROUND_BYTES.min(largest);
        more.sum::<usize>() + largest + messages
    }

    /// Moves the experts to another spread, which every rank was given alike and has checked, and makes it the unit's. All ranks call this
    /// between the same two steps.
    ///
    /// # Errors
    /// A rank was lost, or the way back failed: the unit cannot go on.
    pub fn switch_experts(
        &mut self,
        to: &ExpertSpread,
        ep: &mut ExpertParallel,
        objection: Objection<'_>,
    ) -> Result<SwitchOutcome, UnitError> {
        let from = ep.spread().clone();
        let began = Instant::now();
        let layers = from.copies.layers();
        for layer in 0..layers {
            let Err(cause) = self.switch_layer(layer, &from, to, ep, objection)? else { continue };
            for layer in (0..layer).rev() {
                if let Err(again) = self.switch_layer(layer, to, &from, ep, &mut |_| None)? {
                    let rank = ep.rank().index();
                    return Err(UnitError::protocol(rank, format!("{cause}; and the way back failed: {again}")));
                }
            }
            tracing::warn!(rank = %ep.rank(), layer, "the experts stay where they were: {cause}");
            return Ok(SwitchOutcome::RolledBack { cause });
        }
        ep.set_spread(to.clone());
        tracing::info!(rank = %ep.rank(), seconds = began.elapsed().as_secs_f64(), "the experts have moved");
        Ok(SwitchOutcome::Committed)
    }

    /// One layer; the inner error is the first rank's objection, after which the layer is as it was.
    fn switch_layer(
        &mut self,
        layer: usize,
        from: &ExpertSpread,
        to: &ExpertSpread,
        ep: &mut ExpertParallel,
        objection: Objection<'_>,
    ) -> Result<Result<(), String>, UnitError> {
        let layer = LayerIdx::new(layer as u16);
        let ModelConfig { hidden, expert_width: width, .. } = self.config;
        let blocks = self.weights.blocks.iter_mut();
        let moe = blocks
            .filter_map(|block| if let FeedForward::Moe(moe) = &mut block.feed_forward { Some(moe) } else { None });
        let moe = moe.into_iter().nth(layer.index()).expect("the spread has the model's layers");
        let mut change =
            LayerChange { layer, from, to, rank: ep.rank(), ranks: ep.world(), hidden, width, slices: Vec::new() };
        let prepared = match objection(layer) {
            Some(cause) => Err(Obstacle::Own(cause)),
            None => change.cut_own(moe).map_err(|error| change.broken(&error)),
        };
        let arrived = change.exchange(moe, prepared, ep)?;
        let next = arrived.and_then(|arrived| change.assemble(moe, arrived));
        if let Some(cause) = vote(ep, next.as_ref().err())? {
            return Ok(Err(cause));
        }
        match next {
            Ok(next) => change.install(moe, next),
            Err(Obstacle::Own(cause)) => unreachable!("it was voted on: {cause}"),
            Err(Obstacle::NothingFrom(rank)) => {
                let detail = format!("it sent no experts of layer {layer} and did not say why");
                return Err(UnitError::protocol(rank.index(), detail));
            }
        }
        Ok(Ok(()))
    }
}

/// Why a rank cannot do its part of a layer.
enum Obstacle {
    /// To be said to the others.
    Own(String),
    /// Another rank sent nothing: it will say why.
    NothingFrom(RankId),
}

/// The first objection of any rank, by rank; every rank comes to the same.
fn vote(ep: &mut ExpertParallel, own: Option<&Obstacle>) -> Result<Option<String>, UnitError> {
    let (me, world) = (ep.rank().index(), ep.world());
    let own = match own {
        Some(Obstacle::Own(cause)) => cause.as_str(),
        Some(Obstacle::NothingFrom(_)) | None => "",
    };
    let outgoing = vec![own.as_bytes().to_vec(); world];
    let votes = ep.exchange(outgoing)?;
    let votes = votes.into_iter().enumerate().map(|(rank, vote)| {
        let vote = if rank == me { own.to_owned() } else { String::from_utf8_lossy(&vote).into_owned() };
        (rank, vote)
    });
    let mut objections = votes.filter(|(_, vote)| !vote.is_empty());
    Ok(objections.next().map(|(rank, cause)| format!("rank {rank}: {cause}")))
}

/// One layer's change as one rank takes part in it.
struct LayerChange<'a> {
    layer: LayerIdx,
    from: &'a ExpertSpread,
    to: &'a ExpertSpread,
    rank: RankId,
    ranks: usize,
    hidden: usize,
    /// Of a whole expert.
    width: usize,
    /// From whole to slices: those of this rank's experts, in order; `[experts here, ranks]`.
    slices: Vec<Vec<Expert>>,
}

/// A part that this rank has got.
struct Arrival {
    expert: ExpertId,
    part: Expert,
}

impl LayerChange<'_> {
    fn broken(&self, error: &BadExpert) -> Obstacle {
        Obstacle::Own(format!("experts of layer {} are not whole: {error}", self.layer))
    }

    fn wide(&self, part: Part) -> usize {
        match part {
            Part::Whole => self.width,
            Part::Slice(_) => self.width / self.ranks,
        }
    }

    /// The slot of an expert that this rank has.
    fn slot(&self, expert: ExpertId) -> usize {
        self.from.experts_of(self.rank, self.layer).take_while(|&before| before < expert).count()
    }

    /// Cuts this rank's experts, if there are to be slices.
    fn cut_own(&mut self, moe: &Moe) -> Result<(), BadExpert> {
        if (self.from.layout, self.to.layout) == (ExpertLayout::Ep, ExpertLayout::Tp) {
            let part = self.width / self.ranks;
            for expert in &moe.experts {
                expert.verify()?;
                self.slices.push(expert.cut((0..self.ranks).map(|slice| slice * part..(slice + 1) * part)));
            }
        }
        Ok(())
    }

    /// What this rank provides.
    fn own<'m>(&'m self, moe: &'m Moe, transfer: &Transfer) -> &'m Expert {
        let slot = self.slot(transfer.expert);
        match (transfer.part, self.from.layout) {
            (Part::Slice(slice), ExpertLayout::Ep) => &self.slices[slot][slice.index()],
            _ => &moe.experts[slot],
        }
    }

    /// Sends and takes all parts. A rank that objects takes part with empty messages.
    fn exchange(
        &self,
        moe: &Moe,
        mut state: Result<(), Obstacle>,
        ep: &mut ExpertParallel,
    ) -> Result<Result<Vec<Arrival>, Obstacle>, UnitError> {
        let transfers = moves::transfers(self.layer, self.from, self.to);
        let widest = transfers.iter().map(|transfer| self.wide(transfer.part)).max().unwrap_or(0);
        let size = (ROUND_BYTES / Expert::max_bytes(self.hidden, widest)).max(1);
        let mut arrived = Vec::new();
        for index in 0..moves::rounds(&transfers, self.ranks, size) {
            let round = Round { index, size };
            let outgoing = (0..self.ranks).map(|to| {
                let mut message = Vec::new();
                let to = RankId::new(to as u16);
                if state.is_ok() && to != self.rank {
                    let sent = moves::in_round(&transfers, self.rank, to, round);
                    sent.for_each(|transfer| self.own(moe, &transfer).encode(&mut message));
                }
                message
            });
            let outgoing = outgoing.collect();
            for (from, message) in ep.exchange(outgoing)?.into_iter().enumerate() {
                let from = RankId::new(from as u16);
                if state.is_err() || from == self.rank {
                    continue;
                }
                let mut expected = moves::in_round(&transfers, from, self.rank, round).peekable();
                state = match (expected.peek(), message.is_empty()) {
                    (Some(_), true) => Err(Obstacle::NothingFrom(from)),
                    _ => self.take(&message, expected, &mut arrived).map_err(|error| self.broken(&error)),
                };
            }
        }
        Ok(state.map(|()| arrived))
    }

    fn take(
        &self,
        mut message: &[u8],
        expected: impl Iterator<Item = Transfer>,
        arrived: &mut Vec<Arrival>,
    ) -> Result<(), BadExpert> {
        for Transfer { expert, part, .. } in expected {
            arrived.push(Arrival { expert, part: Expert::decode(&mut message, self.hidden, self.wide(part))? });
        }
        match message.len() {
            0 => Ok(()),
            found => Err(BadExpert::Length { found, width: 0 }),
        }
    }

    /// The experts that this rank did not have in this form, in ascending id.
    fn assemble(&mut self, moe: &Moe, mut arrived: Vec<Arrival>) -> Result<Vec<Arrival>, Obstacle> {
        match (self.from.layout, self.to.layout) {
            (ExpertLayout::Ep, ExpertLayout::Tp) => {
                let own = self.from.experts_of(self.rank, self.layer).zip(&mut self.slices);
                // Cut in rank order, and each is needed once more at most.
                arrived.extend(
                    own.map(|(expert, slices)| Arrival { expert, part: slices.swap_remove(self.rank.index()) }),
                );
                arrived.sort_by_key(|arrival| arrival.expert);
                Ok(arrived)
            }
            (ExpertLayout::Tp, ExpertLayout::Ep) => self.join(moe, &arrived).map_err(|error| self.broken(&error)),
            _ => {
                arrived.sort_by_key(|arrival| arrival.expert);
                Ok(arrived)
            }
        }
    }

    /// Whole experts of everyone's slices; those of one sender arrived in ascending id, and the senders in rank order.
    fn join(&self, moe: &Moe, arrived: &[Arrival]) -> Result<Vec<Arrival>, BadExpert> {
        let new = self.to.experts_of(self.rank, self.layer);
        let join = |expert: ExpertId| {
            let mut slices: Vec<&Expert> =
                arrived.iter().filter(|arrival| arrival.expert == expert).map(|arrival| &arrival.part).collect();
            let own = &moe.experts[self.slot(expert)];
            own.verify()?;
            slices.insert(self.rank.index(), own);
            Ok(Arrival { expert, part: Expert::join(&slices)? })
        };
        new.map(join).collect()
    }

    /// Replaces what the layer had.
    fn install(&self, moe: &mut Moe, next: Vec<Arrival>) {
        let old = std::mem::take(&mut moe.experts);
        if self.from.layout == ExpertLayout::Tp && self.to.layout == ExpertLayout::Tp {
            moe.experts = old;
            return;
        }
        let stays = self.from.layout == ExpertLayout::Ep && self.to.layout == ExpertLayout::Ep;
        let (mut kept, mut leaving) = (Vec::new(), Vec::new());
        for (expert, part) in self.from.experts_of(self.rank, self.layer).zip(old) {
            match stays && self.to.has(self.rank, self.layer, expert) {
                true => kept.push(Arrival { expert, part }),
                false => leaving.push(part),
            }
        }
        let mut new = Vec::new();
        for arrival in next {
            let mut place = leaving.pop();
            match &mut place {
                Some(place) if place.is_like(&arrival.part) => place.overwrite(&arrival.part),
                _ => {
                    place.take().into_iter().for_each(Expert::release);
                    new.push(arrival);
                    continue;
                }
            }
            kept.extend(place.map(|part| Arrival { expert: arrival.expert, part }));
        }
        leaving.into_iter().for_each(Expert::release);
        Expert::settle(&mut new.iter_mut().map(|arrival| &mut arrival.part).collect::<Vec<_>>());
        kept.extend(new);
        kept.sort_by_key(|arrival| arrival.expert);
        moe.experts = kept.into_iter().map(|arrival| arrival.part).collect();
    }
}

#[cfg(test)]
#[path = "switch_tests.rs"]
mod tests;
