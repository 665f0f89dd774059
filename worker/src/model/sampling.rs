//! Random token sampling with temperature, top-k and top-p.

/// Sampling parameters for one token.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Draw {
    /// Divisor of the logits; above 0.
    pub temperature: f32,
    /// Keep the smallest set of most likely tokens that together reach this probability; 1 keeps all.
    pub top_p: f32,
    /// Keep this many of the most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// A random number in `[0, 1)` that selects a token from the cumulative distribution of the tokens kept.
    pub number: f64,
}

/// A candidate token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    /// Proportional to the token's probability; 1 for the most likely token.
    pub(crate) weight: f32,
    pub(crate) id: u32,
}

impl Draw {
    /// Returns the tokens with a weight above 0.
    pub(crate) fn weigh(
        &self,
        largest: f32,
        logits: impl Iterator<Item = (u32, f32)>,
    ) -> impl Iterator<Item = Candidate> {
        let scale = 1.0 / self.temperature;
        let weigh = move |(id, logit): (u32, f32)| Candidate { weight: ((logit - largest) * scale).exp(), id };
        logits.map(weigh).filter(|candidate| candidate.weight > 0.0)
    }

    /// Draws a token, or returns `None` without candidates. Removes the candidates that top-k and top-p exclude.
    pub(crate) fn choose(&self, candidates: &mut Vec<Candidate>) -> Option<u32> {
        self.keep_top_k(candidates);
        self.keep_top_p(candidates);
        self.take(candidates)
    }

    pub(super) fn keep_top_k(&self, candidates: &mut Vec<Candidate>) {
        let k = self.top_k as usize;
        if k > 0 && k < candidates.len() {
            candidates.select_nth_unstable_by(k - 1, likelier);
            candidates.truncate(k);
        }
    }

    /// Keeps the smallest set of most likely candidates that reaches top-p.
    fn keep_top_p(&self, candidates: &mut Vec<Candidate>) {
        let top_p = f64::from(self.top_p);
        if top_p >= 1.0 {
            return order_by_id(candidates);
        }
        let total = total(candidates);
        // The candidates below this floor have a total probability of less than 1 - top_p, so none of them can be
        // needed. Only the others are sorted.
        let floor = total * (1.0 - top_p) / candidates.len().max(1) as f64;
        candidates.retain(|candidate| f64::from(candidate.weight) >= floor);
        candidates.sort_unstable_by(likelier);
        candidates.truncate(nucleus(candidates, top_p * total).unwrap_or(candidates.len()));
    }

    /// Returns the candidate that the random number selects.
    pub(super) fn take(&self, candidates: &[Candidate]) -> Option<u32> {
        let mut left = self.number * total(candidates);
        for &Candidate { weight, id } in candidates {
            left -= f64::from(weight);
            if left < 0.0 {
                return Some(id);
            }
        }
        candidates.last().map(|candidate| candidate.id)
    }
}

/// Orders by descending probability, then by ascending id.
pub(super) fn likelier(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.weight.total_cmp(&a.weight).then(a.id.cmp(&b.id))
}

/// Restores a fixed order that does not depend on the preceding selection.
pub(super) fn order_by_id(candidates: &mut [Candidate]) {
    candidates.sort_unstable_by_key(|candidate| candidate.id);
}

/// Returns how many leading candidates are needed to reach this total weight.
pub(super) fn nucleus(candidates: &[Candidate], needed: f64) -> Option<usize> {
    let mut sum = 0.0;
    let last = candidates.iter().position(|candidate| {
        sum += f64::from(candidate.weight);
        sum >= needed
    });
    last.map(|last| last + 1)
}

pub(super) fn total(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|candidate| f64::from(candidate.weight)).sum()
}
