//! Evidence for rare and unseen tokens: the seen tokens whose strings are most alike.

mod search;
mod strings;
#[cfg(test)]
mod tests;

pub use strings::TokenStrings;

pub(crate) use search::{Neighbours, most_similar};

/// How similar tokens count. How the defaults were chosen is in this crate's README.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Similarity {
    /// Most similar tokens per token.
    pub neighbours: usize,
    /// A neighbour counts by its similarity (a cosine) to this power.
    pub power: f64,
    /// Occurrences of a neighbour above this many add nothing to its weight.
    pub occurrences_cap: f64,
    /// Occurrences of the layer's own shares that are mixed with the neighbours' (which count power and cap).
    pub layer_occurrences: f64,
}

impl Default for Similarity {
    fn default() -> Self {
        Similarity { neighbours: 20, power: 3.0, occurrences_cap: 32.0, layer_occurrences: 0.1 }
    }
}
