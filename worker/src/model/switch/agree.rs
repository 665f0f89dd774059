//! Messages that ranks exchange during a switch, between two steps.

use super::Refusal;
use crate::ep::{ExpertParallel, UnitError};

/// Maximum bytes that one rank sends to another in one collective of a switch.
pub(in crate::model) const ROUND_BYTES: usize = 32 << 20;

const AGREES: u8 = 0;
const OBJECTS: u8 = 1;
const CANNOT: u8 = 2;

/// An obstacle that prevents a rank from doing its part of a switch.
#[derive(Debug)]
pub(in crate::model) enum Obstacle {
    /// This rank's own reason, which it reports to the others.
    Own(String),
    /// A peer did not send its part; it will report the reason itself.
    Peer(usize),
}

/// Runs [`vote_of_spans`] with a single span that contains all ranks.
///
/// # Errors
/// Fails if a rank was lost, or failed without giving a reason.
#[cfg(feature = "gpu")]
pub(in crate::model) fn vote(
    ep: &mut ExpertParallel,
    own: Result<u64, &Obstacle>,
) -> Result<Option<Refusal>, UnitError> {
    vote_of_spans(ep, ep.world(), own)
}

/// Lets all ranks vote on whether to continue a switch. Returns the first objection in rank order, or a mismatch of
/// result digests within a span of `ranks` neighbouring ranks, or `None` if the ranks can continue.
///
/// # Errors
/// Fails if a rank was lost, or failed without giving a reason.
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
        return Err(UnitError::protocol(peer as usize, "it did not do its part of a switch and gave no reason"));
    }
    let first = |rank: usize| rank - rank % ranks;
    let other = (0..votes.len()).find(|&rank| votes[rank] != votes[first(rank)]);
    Ok(other.map(|rank| Refusal::Results { rank, first: first(rank) }))
}

/// Sends a message of any length to every rank, and returns the messages of all ranks, indexed by rank.
///
/// # Errors
/// Fails if a rank was lost.
pub(crate) fn allgather_messages(ep: &mut ExpertParallel, message: Vec<u8>) -> Result<Vec<Vec<u8>>, UnitError> {
    let me = ep.rank().index();
    let mut received = vec![Vec::new(); ep.world()];
    let mut rest = &message[..];
    loop {
        let (now, later) = rest.split_at(rest.len().min(ROUND_BYTES));
        // The last byte indicates whether more bytes follow.
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
