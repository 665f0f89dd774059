//! Arrivals with text: each prompt's score on each rank, and its actual activations there.

use std::collections::{HashMap, HashSet};

use crate::arrivals::{Arrival, BLOCK_TOKENS};
use crate::corpus::{Corpus, Stretch};

/// One request, ready to be routed.
pub(crate) struct Job {
    pub(crate) at: f64,
    pub(crate) prompt_tokens: u32,
    pub(crate) output_tokens: u32,
    /// Names of the prompt's whole blocks.
    pub(crate) blocks: Vec<u64>,
    /// T's mean share by rank: all that a router sees of the experts.
    pub(crate) expected: Vec<f64>,
    /// Recorded share of the prompt's activations by rank: what actually happens.
    pub(crate) local: Vec<f64>,
}

impl Job {
    /// Context length after `generated` tokens.
    pub(crate) fn context(&self, generated: u32) -> u64 {
        u64::from(self.prompt_tokens) + u64::from(generated)
    }
}

/// Assigns text to every arrival. A block that follows another for the first time continues its text, so a conversation
/// keeps its kind; the first block after the common prefix starts at a random place. A prompt without block names is
/// one stretch.
pub(crate) fn jobs(arrivals: &[Arrival], corpus: &Corpus, seed: u64) -> Vec<Job> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut starts: HashMap<u64, u64> = HashMap::new();
    let mut followers: HashMap<u64, u32> = HashMap::new();
    let mut seen = HashSet::new();
    for pair in arrivals.iter().flat_map(|arrival| arrival.blocks.windows(2)) {
        if let [before, after] = *pair
            && seen.insert(after)
        {
            *followers.entry(before).or_default() += 1;
        }
    }
    arrivals
        .iter()
        .map(|arrival| {
            let stretches = if arrival.blocks.is_empty() {
                vec![Stretch { start: random.u64(..corpus.tokens()), tokens: u64::from(arrival.prompt_tokens) }]
            } else {
                stretches(arrival, corpus, &mut starts, &followers, &mut random)
            };
            job(arrival, corpus, &stretches)
        })
        .collect()
}

/// A block followed by more conversations than this is a common prefix, and does not determine their kind.
const COMMON: u32 = 16;

fn stretches(
    arrival: &Arrival,
    corpus: &Corpus,
    starts: &mut HashMap<u64, u64>,
    followers: &HashMap<u64, u32>,
    random: &mut fastrand::Rng,
) -> Vec<Stretch> {
    let mut before: Option<(u64, u64)> = None;
    let mut left = u64::from(arrival.prompt_tokens);
    let mut stretches = Vec::with_capacity(arrival.blocks.len());
    for &block in &arrival.blocks {
        let follows = before.filter(|(name, _)| followers.get(name).is_none_or(|count| *count <= COMMON));
        let start = *starts.entry(block).or_insert_with(|| match follows {
            Some((_, start)) => start + u64::from(BLOCK_TOKENS),
            None => random.u64(..corpus.tokens()),
        });
        let tokens = left.min(u64::from(BLOCK_TOKENS));
        stretches.push(Stretch { start, tokens });
        left -= tokens;
        before = Some((block, start));
    }
    stretches
}

fn job(arrival: &Arrival, corpus: &Corpus, stretches: &[Stretch]) -> Job {
    let ranks = usize::from(corpus.ranks);
    let (mut expected, mut local) = (vec![0.0; ranks], vec![0.0; ranks + 1]);
    for stretch in stretches {
        corpus.add_expected(*stretch, &mut expected);
        corpus.add_activations(*stretch, &mut local);
    }
    let tokens: f64 = stretches.iter().map(|stretch| stretch.tokens as f64).sum();
    expected.iter_mut().for_each(|share| *share /= tokens.max(1.0));
    let all = local.pop().unwrap_or_default();
    // A text without known routes carries no information.
    local.iter_mut().for_each(|share| *share = if all > 0.0 { *share / all } else { 1.0 / ranks as f64 });
    let whole = arrival.prompt_tokens / BLOCK_TOKENS;
    Job {
        at: arrival.at,
        prompt_tokens: arrival.prompt_tokens,
        output_tokens: arrival.output_tokens,
        blocks: arrival.blocks.iter().take(whole as usize).copied().collect(),
        expected,
        local,
    }
}
