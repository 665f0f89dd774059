//! Messages between ranks during a switch, between two steps.

use super::Refusal;
use crate::ep::{ExpertParallel, UnitError};

/// Bytes that a rank sends another in one collective of a switch.
pub(in crate::model) const ROUND_BYTES: usize = 32 << 20;

const AGREES: u8 = 0;
const OBJECTS: u8 = 1;
const CANNOT: u8 = 2;

/// Why a rank cannot do its part.
#[derive(Debug)]
pub(in crate::model) enum Obstacle {
    /// This rank's own reason, to be reported to the others.
    Own(String),
    /// A rank did not send its part and will report why.
    Peer(usize),
}

/// A [`vote_of_spans`] with one span of all ranks.
///
/// # Errors
/// A rank was lost, or failed without a reason.
#[cfg(feature = "gpu")]
pub(in crate::model) fn vote(
    ep: &mut ExpertParallel,
    own: Result<u64, &Obstacle>,
) -> Result<Option<Refusal>, UnitError> {
    vote_of_spans(ep, ep.world(), own)
}

/// Why the ranks cannot continue: the first objection in rank order, or results whose digests differ within a span of
/// `ranks` neighbours. `None` if they can continue.
///
/// # Errors
/// A rank was lost, or failed without a reason.
pub(in crate::model) fn vote_of_spans(
    ep: &mut ExpertParallel,
    ranks: usize,
    own: Result<u64, &Obstacle>,
) -> Result<Option<Refusal>, UnitError> {
    let (vote, detail) = match own {
        Ok(digest) => (AGREES, digest.to_le_bytes().to_vec()),
        Err(Obstacle::Own(cause)) => (OBJECTS, cause.clone().into_bytes()),
        Err(Obstacle::Peer(peer)) => (CANNOT, (*peer as u64).to_le_bytes().to_vec()),
    };
    let votes = allgather_messages(ep, [vec![vote], detail].concat())?;
    let objection = votes.iter().enumerate().find(|(_, vote)| vote.first() == Some(&OBJECTS));
    if let Some((rank, vote)) = objection {
        return Ok(Some(Refusal::Objection { rank, reason: String::from_utf8_lossy(&vote[1..]).into_owned() }));
    }
    if let Some(vote) = votes.iter().find(|vote| vote.first() != Some(&AGREES)) {
        let peer = vote.get(1..).and_then(|word| word.first_chunk()).map_or(0, |word| u64::from_le_bytes(*word));
        return Err(UnitError::protocol(peer as usize, "it failed to do its part of a switch without giving a reason"));
    }
    let first = |rank: usize| rank - rank % ranks;
    let other = (0..votes.len()).find(|&rank| votes[rank] != votes[first(rank)]);
    Ok(other.map(|rank| Refusal::Results { rank, first: first(rank) }))
}

/// Sends every rank the same message, of any length, and returns the messages of all ranks, by rank.
///
/// # Errors
/// A rank was lost.
pub(crate) fn allgather_messages(ep: &mut ExpertParallel, message: Vec<u8>) -> Result<Vec<Vec<u8>>, UnitError> {
    let me = ep.rank().index();
    let mut received = vec![Vec::new(); ep.world()];
    let mut rest = &message[..];
    loop {
        let (now, later) = rest.split_at(rest.len().min(ROUND_BYTES));
        // The last byte says whether more follows.
        let piece: Vec<u8> = now.iter().copied().chain([u8::from(!later.is_empty())]).collect();
        let mut more = !later.is_empty();
        for (rank, mut piece) in ep.exchange(vec![piece; received.len()])?.into_iter().enumerate() {
            if rank != me {
                more |= piece.pop() == Some(1);
                received[rank].append(&mut piece);
            }
        }
        rest = later;
        if !more {
            break;
        }
    }
    received[me] = message;
    Ok(received)
}
