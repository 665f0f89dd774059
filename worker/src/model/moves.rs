//! Which parts of a layer's experts go from which rank to which when their spread changes: pure, and the same on every rank.

use semmoe_tables::{ExpertId, LayerIdx, RankId};

use crate::ep::{ExpertLayout, ExpertSpread};

/// A part of an expert.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Part {
    Whole,
    /// The slice that this rank has in a spread of slices.
    Slice(RankId),
}

/// A part that a rank needs, and the rank that provides it: another one, or the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Transfer {
    pub(super) expert: ExpertId,
    pub(super) part: Part,
    pub(super) from: RankId,
    pub(super) to: RankId,
}

/// Some of the transfers between every two ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Round {
    pub(super) index: usize,
    /// Transfers of a round from one rank to another at most.
    pub(super) size: usize,
}

/// The parts of a layer's experts that ranks need, by expert, then by rank, without those that a rank has already and keeps. A receiver takes its
/// own copy if it holds one; other receivers are spread evenly over the ranks that hold one.
pub(super) fn transfers(layer: LayerIdx, from: &ExpertSpread, to: &ExpertSpread) -> Vec<Transfer> {
    let ranks = || (0..from.copies.groups()).map(RankId::new);
    let mut transfers = Vec::new();
    for expert in (0..from.copies.experts()).map(ExpertId::new) {
        let holders = from.copies.held_by(layer, expert);
        for rank in ranks().filter(|&rank| to.has(rank, layer, expert)) {
            let source = match holders.contains(&rank.get()) {
                true => rank,
                false => RankId::new(holders[(rank.index() + expert.index()) % holders.len()]),
            };
            let whole = Transfer { expert, part: Part::Whole, from: source, to: rank };
            match (from.layout, to.layout) {
                // A hybrid layout has collectives of its own and stays as it is.
                (ExpertLayout::Tp, ExpertLayout::Tp) | (ExpertLayout::Hybrid(_), _) | (_, ExpertLayout::Hybrid(_)) => {}
                (ExpertLayout::Ep, ExpertLayout::Ep) if source == rank => {}
                (ExpertLayout::Ep, ExpertLayout::Ep) => transfers.push(whole),
                (ExpertLayout::Ep, ExpertLayout::Tp) => transfers.push(Transfer { part: Part::Slice(rank), ..whole }),
                (ExpertLayout::Tp, ExpertLayout::Ep) => {
                    transfers.extend(ranks().map(|slice| Transfer { part: Part::Slice(slice), from: slice, ..whole }));
                }
            }
        }
    }
    transfers
}

/// What one rank sends another in a round, in order.
pub(super) fn in_round(
    transfers: &[Transfer],
    from: RankId,
    to: RankId,
    round: Round,
) -> impl Iterator<Item = Transfer> {
    let between = transfers.iter().copied().filter(move |transfer| transfer.from == from && transfer.to == to);
    between.skip(round.index * round.size).take(round.size)
}

/// Rounds of this size that the two ranks with the most transfers between them need.
pub(super) fn rounds(transfers: &[Transfer], ranks: usize, size: usize) -> usize {
    let mut between = vec![0_usize; ranks * ranks];
    for transfer in transfers.iter().filter(|transfer| transfer.from != transfer.to) {
        between[transfer.from.index() * ranks + transfer.to.index()] += 1;
    }
    between.into_iter().max().unwrap_or(0).div_ceil(size)
}
