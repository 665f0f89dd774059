//! Plans the batch of one step.

use semmoe_tables::Attention;

use super::queue::Due;
use crate::ep::StepBatch;

/// A running sequence's next piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ready {
    /// A prompt with unprocessed tokens.
    Prompt { tokens: usize, due: Due },
    /// One token to decode.
    Decode,
}

/// A prompt with unprocessed tokens, and how many of them the next step processes.
struct Prompt<'a> {
    due: Due,
    tokens: usize,
    count: &'a mut usize,
}

/// Returns each sequence's number of tokens in the next step: one for every decoding sequence, then the rest of
/// `budget` for prompts in due order; long prompts are chunked. Decoding never waits for prompts. Prompts never wait
/// for decoding, because the budget exceeds the number of running sequences.
pub(super) fn plan(ready: &[Ready], budget: usize) -> Vec<usize> {
    let mut left = budget;
    let mut counts = vec![0; ready.len()];
    for (count, _) in counts.iter_mut().zip(ready).filter(|(_, ready)| **ready == Ready::Decode) {
        *count = left.min(1);
        left -= *count;
    }
    let mut prompts: Vec<Prompt<'_>> = Vec::new();
    for (count, ready) in counts.iter_mut().zip(ready) {
        if let &Ready::Prompt { tokens, due } = ready {
            prompts.push(Prompt { due, tokens, count });
        }
    }
    prompts.sort_unstable_by_key(|prompt| prompt.due);
    for Prompt { tokens, count, .. } in prompts {
        *count = left.min(tokens);
        left -= *count;
    }
    counts
}

/// Returns the size of a planned step.
pub(super) fn summary(ready: &[Ready], counts: &[usize], attention: Attention) -> StepBatch {
    let of = |decodes: bool| {
        let mine = ready.iter().zip(counts).filter(move |(ready, _)| (**ready == Ready::Decode) == decodes);
        mine.map(|(_, count)| count).sum()
    };
    StepBatch { attention, sequences: of(true), prompt_tokens: of(false) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::SequenceRequest;

    #[test]
    fn decoding_first_then_prompts_in_order() {
        let prompt = |tokens, due_us| Ready::Prompt {
            tokens,
            due: Due::of(&SequenceRequest { due_us, ..SequenceRequest::default() }),
        };
        let ready = [prompt(6, 1), Ready::Decode, prompt(9, 2), Ready::Decode];
        assert_eq!(plan(&ready, 12), [6, 1, 4, 1]);
        assert_eq!(plan(&ready, 100), [6, 1, 9, 1]);
        assert_eq!(plan(&ready, 5), [3, 1, 0, 1]);
        assert_eq!(plan(&ready, 1), [0, 1, 0, 0]);
        assert_eq!(plan(&[], 5), [0; 0]);
        let urgent_last = [prompt(6, 1), Ready::Decode, prompt(9, 2), prompt(3, -1)];
        assert_eq!(plan(&urgent_last, 5), [1, 1, 0, 3]);
        assert_eq!(plan(&urgent_last, 12), [6, 1, 2, 3]);
        let expected = StepBatch { attention: Attention::Tp, sequences: 2, prompt_tokens: 10 };
        assert_eq!(summary(&ready, &plan(&ready, 12), Attention::Tp), expected);
    }
}
