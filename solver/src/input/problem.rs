//! Co-clustering input: sparse activation counts of units (tokens or requests) by column (layer, expert).

use std::ops::Range;

use semmoe_tables::{Attention, LayerIdx, Profile, TokenId, Trace};

use crate::input::error::SolveError;
use crate::input::options::Unit;

/// Limit on sums of counts, so that fixed-point sums fit into 64 bits.
const MAX_COUNTED: u64 = 1 << 50;

/// Activation counts of units by (layer, expert) in CSR format: memory is linear in the number of nonzero counts.
///
/// The column of an expert is `layer * experts + expert`. A unit's mass is its number of tokens with a known route.
#[derive(Clone, Debug, Default)]
pub(crate) struct Problem {
    pub(crate) layers: usize,
    pub(crate) experts: usize,
    /// [U], none zero.
    pub(crate) mass: Vec<u64>,
    /// [U + 1]
    indptr: Vec<usize>,
    /// [nnz], ascending within a unit.
    column: Vec<u32>,
    /// [nnz], none zero.
    count: Vec<u32>,
    /// [L * N] activations of each column.
    pub(crate) column_load: Vec<u64>,
    /// [L * N + 1] offsets into `uses`.
    column_start: Vec<usize>,
    /// The counts by column, for the swap search: [nnz] of (unit, count), ascending within a column.
    uses: Vec<(u32, u32)>,
}

impl Problem {
    /// Builds a problem with a profile's tokens as units, over the given layers (all of them if layers share labels).
    pub(crate) fn from_profile(profile: &Profile, layers: Range<usize>) -> Result<Self, SolveError> {
        let experts = usize::from(profile.model().num_experts);
        let mut problem = Problem::empty(layers.len(), experts);
        let entries = layers.clone().map(|layer| profile.entries(LayerIdx::new(layer as u16))).sum();
        problem.column.reserve_exact(entries);
        problem.count.reserve_exact(entries);
        let mut row = Vec::new();
        for (token, &mass) in (0u32..).zip(profile.token_counts()) {
            row.clear();
            if mass == 0 {
                continue;
            }
            for (index, layer) in layers.clone().enumerate() {
                let counts = profile.row(LayerIdx::new(layer as u16), TokenId::new(token));
                let columns = counts.experts.iter().map(|&expert| (index * experts + usize::from(expert)) as u32);
                row.extend(columns.zip(counts.counts.iter().copied()));
            }
            problem.push(mass, &row);
        }
        problem.finish("profile")
    }

    /// Builds a problem with a trace's requests as units, over all layers and all their tokens.
    pub(crate) fn from_trace(trace: &Trace) -> Result<Self, SolveError> {
        let (layers, experts) = (trace.model().layers(), usize::from(trace.model().num_experts));
        let mut problem = Problem::empty(layers, experts);
        let mut counts = vec![0u32; layers * experts];
        let mut row = Vec::new();
        for request in trace.iter() {
            let mut mass = 0;
            for position in 0..request.token_ids().len() {
                let mut known = false;
                for (layer, route) in request.routes(position) {
                    known = true;
                    for expert in route.experts() {
                        let count = &mut counts[layer.index() * experts + expert.index()];
                        *count = count.saturating_add(1);
                    }
                }
                mass += u64::from(known);
            }
            row.clear();
            row.extend((0u32..).zip(counts.iter().copied()).filter(|&(_, count)| count > 0));
            counts.fill(0);
            if mass > 0 {
                problem.push(mass, &row);
            }
        }
        problem.finish("trace")
    }

    pub(crate) fn units(&self) -> usize {
        self.mass.len()
    }

    /// Number of nonzero counts.
    pub(crate) fn entries(&self) -> usize {
        self.count.len()
    }

    pub(crate) fn total_mass(&self) -> u64 {
        self.mass.iter().sum()
    }

    pub(crate) fn total_activations(&self) -> u64 {
        self.column_load.iter().sum()
    }

    /// Returns a unit's columns and counts.
    pub(crate) fn row(&self, unit: usize) -> impl Iterator<Item = (usize, u32)> {
        let span = self.indptr[unit]..self.indptr[unit + 1];
        self.column[span.clone()].iter().map(|&column| column as usize).zip(self.count[span].iter().copied())
    }

    /// Returns the column range of a layer.
    pub(crate) fn columns(&self, layer: usize) -> Range<usize> {
        layer * self.experts..(layer + 1) * self.experts
    }

    /// Returns the activations of each expert in a layer, [N].
    pub(crate) fn load(&self, layer: usize) -> &[u64] {
        &self.column_load[self.columns(layer)]
    }

    /// Returns a column's units and counts.
    pub(crate) fn column(&self, column: usize) -> &[(u32, u32)] {
        &self.uses[self.column_start[column]..self.column_start[column + 1]]
    }

    /// Returns the local activations of every unit on every group, [U, G], given the group of each column.
    pub(crate) fn local_counts(&self, group_of: &[u16], groups: usize) -> Vec<u64> {
        self.local_where(groups, |column| std::slice::from_ref(&group_of[column]))
    }

    /// Returns the local activations of every unit on every group, [U, G], given all groups that hold each column's
    /// expert.
    #[inline]
    pub(crate) fn local_where<'h>(&self, groups: usize, holders: impl Fn(usize) -> &'h [u16]) -> Vec<u64> {
        let mut local = vec![0; self.units() * groups];
        for (unit, sums) in local.chunks_exact_mut(groups).enumerate() {
            for (column, count) in self.row(unit) {
                holders(column).iter().for_each(|&group| sums[usize::from(group)] += u64::from(count));
            }
        }
        local
    }

    fn empty(layers: usize, experts: usize) -> Self {
        Problem { layers, experts, indptr: vec![0], ..Problem::default() }
    }

    fn push(&mut self, mass: u64, row: &[(u32, u32)]) {
        self.mass.push(mass);
        self.column.extend(row.iter().map(|entry| entry.0));
        self.count.extend(row.iter().map(|entry| entry.1));
        self.indptr.push(self.column.len());
    }

    /// Checks the sums after all units have been added.
    fn finish(mut self, what: &'static str) -> Result<Self, SolveError> {
        if self.column.is_empty() {
            return Err(SolveError::NoTokens { what });
        }
        let tokens: u128 = self.mass.iter().map(|&mass| u128::from(mass)).sum();
        let activations: u128 = self.count.iter().map(|&count| u128::from(count)).sum();
        let units = self.units() as u128;
        let limits = [
            ("tokens", tokens, MAX_COUNTED),
            ("activations", activations, MAX_COUNTED),
            ("units", units, u64::from(u32::MAX) - 1),
        ];
        for (what, found, limit) in limits {
            if found > u128::from(limit) {
                return Err(SolveError::TooLarge { what, found, limit });
            }
        }
        self.index_columns();
        Ok(self)
    }

    /// Renumbers the columns with `to`, which must preserve their order, for layers of `experts` columns.
    pub(crate) fn move_columns(&mut self, experts: usize, to: impl Fn(usize) -> usize) {
        self.experts = experts;
        self.column.iter_mut().for_each(|column| *column = to(*column as usize) as u32);
        self.index_columns();
    }

    fn index_columns(&mut self) {
        self.column_load = vec![0; self.layers * self.experts];
        for (&column, &count) in self.column.iter().zip(&self.count) {
            self.column_load[column as usize] += u64::from(count);
        }
        let mut indptr = vec![0; self.column_load.len() + 1];
        for &column in &self.column {
            indptr[column as usize + 1] += 1;
        }
        for column in 1..indptr.len() {
            indptr[column] += indptr[column - 1];
        }
        let mut next = indptr.clone();
        let mut entries = vec![(0, 0); self.column.len()];
        for unit in 0..self.units() {
            for at in self.indptr[unit]..self.indptr[unit + 1] {
                let slot = &mut next[self.column[at] as usize];
                entries[*slot] = (unit as u32, self.count[at]);
                *slot += 1;
            }
        }
        (self.column_start, self.uses) = (indptr, entries);
    }
}

/// Builds the problems to cluster: one per layer with attention tp, otherwise one for all layers.
pub(crate) fn problems(
    profile: &Profile,
    trace: Option<&Trace>,
    attention: Attention,
) -> Result<(Unit, Vec<Problem>), SolveError> {
    let layers = profile.model().layers();
    match (attention, trace) {
        (Attention::Dp, Some(trace)) => Ok((Unit::Request, vec![Problem::from_trace(trace)?])),
        (Attention::Dp, None) => Ok((Unit::Token, vec![Problem::from_profile(profile, 0..layers)?])),
        (Attention::Tp, _) => {
            let each = (0..layers).map(|layer| match Problem::from_profile(profile, layer..layer + 1) {
                Err(SolveError::NoTokens { .. }) if profile.total_tokens() > 0 => {
                    Err(SolveError::SilentLayer { layer: profile.model().layer_ids[layer] })
                }
                problem => problem,
            });
            Ok((Unit::Token, each.collect::<Result<_, _>>()?))
        }
    }
}
