//! Text for the prompts: recorded tokens with their recorded experts, and tables that were solved on other text.
//!
//! The trace's requests are concatenated, grouped by kind if known, so that a long prompt is of one kind. A piece of a
//! prompt is a stretch of that text; prefix sums give its score by T and its activations.

use std::collections::BTreeMap;
use std::path::Path;

use semmoe_tables::{LayerIdx, Tables, TokenId, Trace};

use crate::error::ReplayError;

/// A stretch of text: start and length in tokens. The text wraps around at its end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Stretch {
    pub(crate) start: u64,
    pub(crate) tokens: u64,
}

pub(crate) struct Corpus {
    pub(crate) ranks: u16,
    /// [n + 1, ranks] prefix sums of T.
    expected: Vec<f64>,
    /// [n + 1, ranks + 1] prefix sums of activations by rank, and of all.
    activations: Vec<u64>,
    tokens: u64,
}

impl Corpus {
    pub(crate) fn open(tables: &Path, trace: &Path, requests: Option<&Path>) -> Result<Self, ReplayError> {
        let (tables, trace) = (Tables::open(tables)?, Trace::open(trace)?);
        tables.model().check_compatible(trace.model())?;
        if tables.dp_ranks() == 0 || tables.token_row(TokenId::new(0)).is_none() {
            return Err(ReplayError::Input {
                found: "tables for attention tp".to_owned(),
                expected: "tables for attention dp",
            });
        }
        if tables.physical_to_logical().is_some() {
            return Err(ReplayError::Input {
                found: "tables with replicas".to_owned(),
                expected: "one rank for each expert",
            });
        }
        if trace.tokens() == 0 {
            return Err(ReplayError::Input { found: "a trace without tokens".to_owned(), expected: "recorded text" });
        }
        let order = order(trace.requests(), requests)?;
        Ok(Self::new(&tables, &trace, &order))
    }

    fn new(tables: &Tables, trace: &Trace, order: &[usize]) -> Self {
        let ranks = usize::from(tables.dp_ranks());
        let mut corpus =
            Corpus { ranks: tables.dp_ranks(), expected: vec![0.0; ranks], activations: vec![0; ranks + 1], tokens: 0 };
        for &index in order {
            let request = trace.request(index);
            for (position, &token) in request.token_ids().iter().enumerate() {
                let (expected, activations) = (corpus.expected.len() - ranks, corpus.activations.len() - ranks - 1);
                corpus.expected.extend_from_within(expected..);
                corpus.activations.extend_from_within(activations..);
                let row = tables.token_row(TokenId::new(token)).unwrap_or_default();
                corpus.expected[expected + ranks..].iter_mut().zip(row).for_each(|(sum, share)| *sum += share.to_f64());
                let sums = &mut corpus.activations[activations + ranks + 1..];
                for layer in (0..tables.model().layers() as u16).map(LayerIdx::new) {
                    for expert in request.route(position, layer).iter().flat_map(|route| route.experts()) {
                        let group = tables.placement().group_of(layer, expert);
                        sums[tables.group_to_dp()[group.index()].index()] += 1;
                        sums[ranks] += 1;
                    }
                }
                corpus.tokens += 1;
            }
        }
        corpus
    }

    pub(crate) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Adds T's shares of a stretch to `sums`, one for each rank.
    pub(crate) fn add_expected(&self, stretch: Stretch, sums: &mut [f64]) {
        let ranks = usize::from(self.ranks);
        self.pieces(stretch, |from, to, times| {
            for (rank, sum) in sums.iter_mut().enumerate() {
                *sum += times * (self.expected[to * ranks + rank] - self.expected[from * ranks + rank]);
            }
        });
    }

    /// Adds a stretch's activations to `sums`: one for each rank, then all.
    pub(crate) fn add_activations(&self, stretch: Stretch, sums: &mut [f64]) {
        let columns = usize::from(self.ranks) + 1;
        self.pieces(stretch, |from, to, times| {
            for (column, sum) in sums.iter_mut().enumerate() {
                let count = self.activations[to * columns + column] - self.activations[from * columns + column];
                *sum += times * count as f64;
            }
        });
    }

    /// Splits a stretch at the end of the text; reports each piece, and how often it occurs.
    fn pieces(&self, stretch: Stretch, mut add: impl FnMut(usize, usize, f64)) {
        let (start, end) = (stretch.start % self.tokens, stretch.start % self.tokens + stretch.tokens);
        let (rounds, rest) = (end / self.tokens, (end % self.tokens) as usize);
        if rounds == 0 {
            add(start as usize, rest, 1.0);
            return;
        }
        add(start as usize, self.tokens as usize, 1.0);
        if rounds > 1 {
            add(0, self.tokens as usize, (rounds - 1) as f64);
        }
        add(0, rest, 1.0);
    }
}

/// The trace's requests ordered by kind, the `domain` in a file of JSON Lines; in recorded order without one.
fn order(count: usize, requests: Option<&Path>) -> Result<Vec<usize>, ReplayError> {
    let Some(path) = requests else { return Ok((0..count).collect()) };
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path)
        .map_err(|error| ReplayError::Read { path: name.clone(), cause: error.to_string() })?;
    let mut by_domain: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    let mut lines = 0;
    for (index, line) in text.lines().enumerate() {
        let wrong = |cause: String| ReplayError::Line { path: name.clone(), line: index + 1, cause };
        let line: serde_json::Value = serde_json::from_str(line).map_err(|error| wrong(error.to_string()))?;
        let domain = line["domain"].as_str().ok_or_else(|| wrong("no \"domain\"".to_owned()))?;
        by_domain.entry(domain.to_owned()).or_default().push(index);
        lines += 1;
    }
    if lines != count {
        return Err(ReplayError::Input {
            found: format!("{name} has {lines} requests"),
            expected: "one for each of the trace",
        });
    }
    Ok(by_domain.into_values().flatten().collect())
}
