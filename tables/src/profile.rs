//! Profiles: how often each token activated each expert, layer by layer, as sparse rows.

use std::str::FromStr;

use crate::container::{Container, View};
use crate::model::{by_name, quoted};
use crate::{FormatError, LayerIdx, ModelInfo, Phase, ProfileBuilder, Provenance, TokenId, Trace};

/// Maximum bits of the number of tokens, so that products with k or N still fit into 64 bits.
const TOKEN_BITS: u32 = 48;
/// The `format` field of a profile.
pub(crate) const FORMAT: &str = "semmoe.profile";
const TENSORS: [&str; 4] = ["token_count", "indptr", "expert", "count"];

impl FromStr for Phase {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        by_name(text).ok_or_else(|| FormatError::field("phase", quoted(text), "prefill, decode or all"))
    }
}

/// Adds to a profile's number of tokens.
pub(crate) fn add_tokens(sum: u64, n: u64) -> Result<u64, FormatError> {
    let sum = sum.checked_add(n).filter(|sum| *sum < 1 << TOKEN_BITS);
    sum.ok_or_else(|| FormatError::CountOverflow { what: "all tokens".into(), bits: TOKEN_BITS })
}

/// A profile, validated when opened.
#[derive(Debug)]
pub struct Profile {
    container: Container,
    model: ModelInfo,
    provenance: Provenance,
    phase: Phase,
    total_tokens: u64,
    token_count: View<u64>,
    indptr: View<u64>,
    expert: View<u16>,
    count: View<u32>,
}

/// Counts of one token's activations per expert in one layer; experts never activated are absent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProfileRow<'a> {
    /// Expert ids in ascending order.
    pub experts: &'a [u16],
    /// The counts of `experts`, in the same order; never zero.
    pub counts: &'a [u32],
}

impl<'a> ProfileRow<'a> {
    /// Iterates over the experts with their counts, ascending.
    pub fn iter(&self) -> impl Iterator<Item = (u16, u32)> + use<'a> {
        self.experts.iter().copied().zip(self.counts.iter().copied())
    }

    /// Returns the total activations: k x the occurrences of the token with a known route in this layer.
    pub fn activations(&self) -> u64 {
        self.counts.iter().map(|&c| u64::from(c)).sum()
    }
}

format_file!(Profile, FORMAT);

impl Profile {
    fn from_container(container: Container) -> Result<Self, FormatError> {
        let (model, provenance) = container.about(FORMAT, &TENSORS)?;
        let phase = container.metadata.get("phase").map_or(Ok(Phase::All), |text| text.parse())?;
        let (vocabulary, layers) = (u64::from(model.vocab_size), model.layers() as u64);
        let entries = container.len("expert")?;
        let mut profile = Profile {
            token_count: container.view("token_count", &[vocabulary])?,
            indptr: container.view("indptr", &[layers, vocabulary + 1])?,
            expert: container.view("expert", &[entries])?,
            count: container.view("count", &[entries])?,
            total_tokens: 0,
            container,
            model,
            provenance,
            phase,
        };
        profile.validate()?;
        profile.total_tokens = profile.token_counts().iter().try_fold(0, |sum, &n| add_tokens(sum, n))?;
        Ok(profile)
    }

    /// Counts all tokens of a trace.
    ///
    /// # Errors
    /// If a count overflows.
    pub fn of_trace(trace: &Trace) -> Result<Self, FormatError> {
        let mut builder = ProfileBuilder::new(trace.model().clone(), trace.provenance().clone(), Phase::All)?;
        builder.add_trace(trace)?;
        builder.finish()
    }

    fn validate(&self) -> Result<(), FormatError> {
        self.check_indptr()?;
        let mut seen = vec![false; self.token_counts().len()];
        for layer in 0..self.model.layers() {
            for (token, seen) in seen.iter_mut().enumerate() {
                let row = self.row_at(layer, token);
                *seen |= !row.experts.is_empty();
                check_row(&self.model, row, self.token_counts()[token]).map_err(|(tensor, found, expected)| {
                    FormatError::value(tensor, format!("layer {layer}, token {token}"), found, expected)
                })?;
            }
            self.container.release_all();
        }
        check_routed(self.token_counts(), &seen)
    }

    /// Checks the offsets, which are absolute: they ascend through all layers, from 0 to the number of entries.
    fn check_indptr(&self) -> Result<(), FormatError> {
        let indptr = self.container.slice(&self.indptr);
        let columns = self.model.vocab_size as usize + 1;
        let entries = self.container.slice(&self.expert).len() as u64;
        let mut before = 0;
        for (index, &offset) in indptr.iter().enumerate() {
            // Each layer must start where the previous one ends.
            let gap = index % columns == 0 && offset != before;
            if offset < before || gap {
                let at = format!("layer {}, index {}", index / columns, index % columns);
                let expected = format!("{} {before}", if gap { "exactly" } else { "at least" });
                return Err(FormatError::value("indptr", at, offset, expected));
            }
            before = offset;
        }
        if before != entries {
            let expected = format!("{entries}, the number of entries");
            return Err(FormatError::value("indptr", "its end", before, expected));
        }
        Ok(())
    }

    /// The request tokens that this profile counts.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Returns the occurrences of a token, or 0 for ids outside the vocabulary.
    pub fn token_count(&self, token: TokenId) -> u64 {
        self.token_counts().get(token.index()).copied().unwrap_or(0)
    }

    /// Returns the occurrences of every token, \[V\].
    pub fn token_counts(&self) -> &[u64] {
        self.container.slice(&self.token_count)
    }

    /// Iterates over the tokens that occurred, with their counts.
    pub fn seen(&self) -> impl Iterator<Item = (TokenId, u64)> {
        let counts = (0..).map(TokenId::new).zip(self.token_counts().iter().copied());
        counts.filter(|(_, count)| *count > 0)
    }

    /// Returns the activations of every expert in a layer, over all tokens, \[N\].
    ///
    /// # Panics
    /// If the layer is not below L.
    pub fn expert_loads(&self, layer: LayerIdx) -> Vec<u64> {
        let mut loads = vec![0; usize::from(self.model.num_experts)];
        let counts = self.layer_rows(layer).flat_map(|row| row.iter());
        counts.for_each(|(expert, count)| loads[usize::from(expert)] += u64::from(count));
        loads
    }

    /// Returns the activations of a token in a layer.
    ///
    /// # Panics
    /// If the layer is not below L or the token not below V.
    pub fn row(&self, layer: LayerIdx, token: TokenId) -> ProfileRow<'_> {
        assert!(layer.index() < self.model.layers() && token.get() < self.model.vocab_size);
        self.row_at(layer.index(), token.index())
    }

    /// Iterates over the activations of every token in a layer, in order of ids.
    ///
    /// # Panics
    /// If the layer is not below L.
    pub fn layer_rows(&self, layer: LayerIdx) -> impl Iterator<Item = ProfileRow<'_>> {
        (0..self.model.vocab_size).map(move |token| self.row(layer, TokenId::new(token)))
    }

    /// Number of nonzero counts in a layer, over all tokens.
    ///
    /// # Panics
    /// If the layer is not below L.
    pub fn entries(&self, layer: LayerIdx) -> usize {
        let (indptr, columns) = (self.container.slice(&self.indptr), self.model.vocab_size as usize + 1);
        let first = layer.index() * columns;
        (indptr[first + columns - 1] - indptr[first]) as usize
    }

    fn row_at(&self, layer: usize, token: usize) -> ProfileRow<'_> {
        let indptr = self.container.slice(&self.indptr);
        let at = layer * (self.model.vocab_size as usize + 1) + token;
        let span = indptr[at] as usize..indptr[at + 1] as usize;
        ProfileRow {
            experts: &self.container.slice(&self.expert)[span.clone()],
            counts: &self.container.slice(&self.count)[span],
        }
    }

    /// Returns the total occurrences of all tokens.
    pub fn total_tokens(&self) -> u64 {
        self.total_tokens
    }

    /// Returns the SHA-256 over the tensors as lower-case hex.
    pub fn digest(&self) -> String {
        self.container.digest().to_owned()
    }

    /// Releases the pages of the file; they are read again on the next access.
    pub fn release(&self) {
        self.container.release_all();
    }
}

/// Checks that tokens with a count have a route in at least one layer; `seen` marks tokens with a row.
pub(crate) fn check_routed(token_count: &[u64], seen: &[bool]) -> Result<(), FormatError> {
    let Some(token) = (0..seen.len()).find(|&token| token_count[token] > 0 && !seen[token]) else { return Ok(()) };
    let expected = "0, as this token has no route in any layer";
    Err(FormatError::value("token_count", format!("token {token}"), token_count[token], expected))
}

/// Checks that a row could be the counts of a token with this many occurrences. An error contains the tensor, what was
/// found and what was expected.
pub(crate) fn check_row(
    model: &ModelInfo,
    row: ProfileRow<'_>,
    occurrences: u64,
) -> Result<(), (&'static str, String, String)> {
    let (n, k) = (model.num_experts, u64::from(model.top_k));
    if let Some(pair) = row.experts.windows(2).find(|pair| pair[0] >= pair[1]) {
        return Err(("expert", format!("{} after {}", pair[1], pair[0]), "ascending ids".into()));
    }
    if let Some(last) = row.experts.last().filter(|&&last| last >= n) {
        return Err(("expert", last.to_string(), format!("ids below {n}")));
    }
    // Cannot overflow, because there are at most 65534 counts of 32 bits.
    let sum = row.activations();
    let known = sum / k;
    if !sum.is_multiple_of(k) {
        return Err(("count", format!("counts that add up to {sum}"), format!("a multiple of top_k ({k})")));
    }
    if known > occurrences {
        let expected = format!("at most top_k x token_count ({k} x {occurrences})");
        return Err(("count", format!("counts that add up to {sum}"), expected));
    }
    let valid = |&c: &u32| c > 0 && u64::from(c) <= known;
    if let Some(count) = row.counts.iter().copied().find(|c| !valid(c)) {
        return Err(("count", count.to_string(), format!("1 to {known}, the occurrences of the row")));
    }
    Ok(())
}
