//! The messages of a switch: each header identifies the round and carries a vote.

use super::error::{Fault, Reason, Refusal};
use crate::collectives::UnitError;

/// Size of a header: reason (0 = none), kind, layer, digest of the switch.
pub(super) const HEADER_BYTES: usize = 1 + 1 + 4 + 8;

/// The values that all ranks must agree on in each round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Round {
    pub(super) digest: u64,
    pub(super) layer: usize,
}

/// The purpose of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Kind {
    /// The last bytes of a layer from this rank.
    Last,
    /// Bytes of a layer, with more to come.
    More,
    /// A vote: whether this rank accepts a layer that it has placed.
    Vote,
}

/// A received message.
struct Received<'a> {
    reason: Option<Reason>,
    kind: Kind,
    bytes: &'a [u8],
}

impl Round {
    /// Writes the header into each message.
    pub(super) fn head(self, messages: &mut [Vec<u8>], kind: Kind, reason: Option<Reason>) {
        for message in messages {
            message.resize(message.len().max(HEADER_BYTES), 0);
            message[0] = reason.map_or(0, |reason| reason as u8);
            message[1] = kind as u8;
            message[2..6].copy_from_slice(&(self.layer as u32).to_le_bytes());
            message[6..HEADER_BYTES].copy_from_slice(&self.digest.to_le_bytes());
        }
    }

    /// Reads the headers of messages with expert bytes, of which each peer p must have sent `due[p]`. Returns whether
    /// any rank has more bytes of this layer.
    pub(super) fn more(self, own: usize, messages: &[Vec<u8>], due: &[usize]) -> Result<bool, UnitError> {
        let mut more = false;
        for (peer, message) in others(own, messages) {
            let Received { kind, bytes, .. } = self.read(peer, message)?;
            if bytes.len() != due[peer] || kind == Kind::Vote {
                let detail = format!("{} expert bytes, expected {}", bytes.len(), due[peer]);
                return Err(UnitError::protocol(peer, detail));
            }
            more |= kind == Kind::More;
        }
        Ok(more)
    }

    /// Reads the votes. Returns the refusal of the lowest rank that refused, counting this rank too; `None` if all
    /// accepted.
    pub(super) fn refusal(
        self,
        own: usize,
        messages: &[Vec<u8>],
        fault: Option<&Fault>,
    ) -> Result<Option<Refusal>, UnitError> {
        let mut reasons = vec![None; messages.len()];
        reasons[own] = fault.map(Fault::reason);
        for (peer, message) in others(own, messages) {
            let Received { reason, kind, bytes } = self.read(peer, message)?;
            if kind != Kind::Vote || !bytes.is_empty() {
                return Err(UnitError::protocol(peer, format!("{} expert bytes instead of a vote", bytes.len())));
            }
            reasons[peer] = reason;
        }
        let first = reasons.into_iter().enumerate().find_map(|(rank, reason)| Some((rank, reason?)));
        Ok(first.map(|(rank, reason)| Refusal { layer: self.layer, rank, reason }))
    }

    fn read(self, peer: usize, message: &[u8]) -> Result<Received<'_>, UnitError> {
        let Some((head, bytes)) = message.split_first_chunk::<HEADER_BYTES>() else {
            let detail = format!("switch message of {} bytes, expected at least {HEADER_BYTES}", message.len());
            return Err(UnitError::protocol(peer, detail));
        };
        let [reason, kind, l0, l1, l2, l3, digest @ ..] = *head;
        let (layer, digest) = (u32::from_le_bytes([l0, l1, l2, l3]), u64::from_le_bytes(digest));
        if digest != self.digest || layer as usize != self.layer {
            let expected = self.layer;
            let detail = format!("it sent layer {layer}, expected layer {expected} of this rank's switch");
            return Err(UnitError::protocol(peer, detail));
        }
        let reason = match reason {
            0 => None,
            1 => Some(Reason::Checksum),
            2 => Some(Reason::Memory),
            3 => Some(Reason::Stopped),
            _ => return Err(UnitError::protocol(peer, format!("vote {reason}, expected 0 to 3"))),
        };
        let kind = match kind {
            0 => Kind::Last,
            1 => Kind::More,
            2 => Kind::Vote,
            _ => return Err(UnitError::protocol(peer, format!("message of kind {kind}, expected 0 to 2"))),
        };
        Ok(Received { reason, kind, bytes })
    }
}

fn others(own: usize, messages: &[Vec<u8>]) -> impl Iterator<Item = (usize, &[u8])> {
    let messages = messages.iter().map(Vec::as_slice).enumerate();
    messages.filter(move |(peer, _)| *peer != own)
}
