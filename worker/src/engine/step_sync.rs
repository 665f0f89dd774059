//! Messages that ranks exchange before each step under attention tp: their last step, the tokens that they sampled in
//! it, and rank 0's commands. Every length is validated; a malformed message is a protocol error.
//!
//! | field | type | what |
//! |---|---|---|
//! | steps | u64 | number of completed steps |
//! | digest | u64 | digest of the last batch: its sequences and their token counts |
//! | chosen c | u32 | number of tokens that this rank sampled |
//! | entries | `[c]` | sequence u64, flags u8 (1 a token, 2 logprobs), token u32, then logprob f32, u16 t, t of (token
//! u32, logprob f32) |
//! | orders | JSON | rank 0's commands, in order; empty from other ranks |

use super::request::TokenLogprobs;
use super::sequence::Sampled;
use crate::control::message::ToRank;

/// Maximum bytes of commands in one message; further commands wait for the next message.
pub(super) const MAX_ORDER_BYTES: usize = 16 << 20;
const HAS_TOKEN: u8 = 1;
const HAS_LOGPROBS: u8 = 2;

/// One rank's message.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct StepSync {
    pub(super) steps: u64,
    pub(super) digest: u64,
    /// In batch order.
    pub(super) chosen: Vec<Chosen>,
    pub(super) orders: Vec<ToRank>,
}

/// An invalid message.
#[derive(Debug, thiserror::Error)]
pub(super) enum SyncError {
    #[error("the message ends inside a field")]
    Cut,
    #[error("flags {0}, expected at most {max}", max = HAS_TOKEN | HAS_LOGPROBS)]
    Flags(u8),
    #[error("unreadable commands: {0}")]
    Orders(#[from] serde_json::Error),
}

/// The token that a rank sampled for one of its sequences.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Chosen {
    pub(super) sequence: u64,
    /// `None` if the logits were unusable.
    pub(super) sampled: Option<Sampled>,
}

impl StepSync {
    pub(super) fn encode(&self, out: &mut Vec<u8>) -> Result<(), serde_json::Error> {
        out.clear();
        out.extend_from_slice(&self.steps.to_le_bytes());
        out.extend_from_slice(&self.digest.to_le_bytes());
        // The cast is lossless, because a batch has at most a few thousand sequences.
        out.extend_from_slice(&(self.chosen.len() as u32).to_le_bytes());
        for Chosen { sequence, sampled } in &self.chosen {
            let logprobs = sampled.as_ref().and_then(|sampled| sampled.logprobs.as_ref());
            let flags = (HAS_TOKEN * u8::from(sampled.is_some())) | (HAS_LOGPROBS * u8::from(logprobs.is_some()));
            out.extend_from_slice(&sequence.to_le_bytes());
            out.push(flags);
            out.extend_from_slice(&sampled.as_ref().map_or(0, |sampled| sampled.token).to_le_bytes());
            if let Some(TokenLogprobs { logprob, top }) = logprobs {
                out.extend_from_slice(&logprob.to_le_bytes());
                out.extend_from_slice(&(top.len() as u16).to_le_bytes());
                for (token, logprob) in top {
                    out.extend_from_slice(&token.to_le_bytes());
                    out.extend_from_slice(&logprob.to_le_bytes());
                }
            }
        }
        match self.orders.is_empty() {
            true => Ok(()),
            false => serde_json::to_writer(out, &self.orders),
        }
    }

    pub(super) fn decode(message: &[u8]) -> Result<Self, SyncError> {
        let mut reader = Reader(message);
        let (steps, digest) = (u64::from_le_bytes(reader.take()?), u64::from_le_bytes(reader.take()?));
        let count = u32::from_le_bytes(reader.take()?);
        let mut chosen = Vec::new();
        for _ in 0..count {
            chosen.push(reader.chosen()?);
        }
        let orders = match reader.0 {
            [] => Vec::new(),
            json => serde_json::from_slice(json)?,
        };
        Ok(Self { steps, digest, chosen, orders })
    }
}

/// The unread remainder of a message.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], SyncError> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(SyncError::Cut)?;
        self.0 = rest;
        Ok(*taken)
    }

    fn chosen(&mut self) -> Result<Chosen, SyncError> {
        let sequence = u64::from_le_bytes(self.take()?);
        let [flags] = self.take()?;
        let token = u32::from_le_bytes(self.take()?);
        if flags & !(HAS_TOKEN | HAS_LOGPROBS) != 0 {
            return Err(SyncError::Flags(flags));
        }
        let logprobs = match flags & HAS_LOGPROBS {
            0 => None,
            _ => Some(self.logprobs()?),
        };
        Ok(Chosen { sequence, sampled: (flags & HAS_TOKEN != 0).then_some(Sampled { token, logprobs }) })
    }

    fn logprobs(&mut self) -> Result<TokenLogprobs, SyncError> {
        let logprob = f32::from_le_bytes(self.take()?);
        let count = u16::from_le_bytes(self.take()?);
        let pair = |_| Ok((u32::from_le_bytes(self.take()?), f32::from_le_bytes(self.take()?)));
        Ok(TokenLogprobs { logprob, top: (0..count).map(pair).collect::<Result<_, SyncError>>()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message_of_a_rank() -> StepSync {
        let logprobs = TokenLogprobs { logprob: -0.5, top: vec![(7, -0.5), (8, -1.5)] };
        StepSync {
            steps: 9,
            digest: u64::MAX,
            chosen: vec![
                Chosen { sequence: 3, sampled: Some(Sampled { token: 7, logprobs: Some(logprobs) }) },
                Chosen { sequence: u64::MAX, sampled: None },
            ],
            orders: vec![ToRank::Cancel { id: 3 }, ToRank::Flush],
        }
    }

    #[test]
    fn a_message_is_read_as_it_was_written() {
        let mut message = vec![1];
        for sync in [message_of_a_rank(), StepSync::default()] {
            sync.encode(&mut message).unwrap();
            assert_eq!(StepSync::decode(&message).unwrap(), sync);
        }
    }

    #[test]
    fn damaged_words_are_refused_and_never_allocate_what_they_claim() {
        let mut message = Vec::new();
        message_of_a_rank().encode(&mut message).unwrap();
        let orders = serde_json::to_vec(&message_of_a_rank().orders).unwrap().len();
        for cut in 0..message.len() {
            // Truncated exactly before the orders, the message is valid without any.
            let whole = cut == message.len() - orders;
            assert_eq!(StepSync::decode(&message[..cut]).is_ok(), whole, "{cut}");
        }
        let mut claims = message.clone();
        claims[16..20].fill(0xff);
        assert!(StepSync::decode(&claims).is_err());
        let mut flags = message;
        flags[28] = 4;
        assert_eq!(StepSync::decode(&flags).unwrap_err().to_string(), "flags 4, expected at most 3");
    }
}
