//! The distinct sets of experts that a layer's tokens activate together, with counts by unit.

use std::collections::HashMap;

use semmoe_tables::{LayerIdx, Profile, Route, Trace, TraceRequest};

use crate::input::has_route;

/// Maps an occurrence in a trace to its unit, or to `None` if no unit contains it.
pub(crate) enum UnitOf {
    /// By request, for units made by `Problem::from_trace`.
    Request(Vec<Option<u32>>),
    /// By token, for units made by `Problem::from_profile`.
    Token(Vec<Option<u32>>),
}

impl UnitOf {
    pub(crate) fn request(trace: &Trace) -> Self {
        UnitOf::Request(numbered(trace.iter().map(has_route)))
    }

    pub(crate) fn token(profile: &Profile) -> Self {
        UnitOf::Token(numbered(profile.token_counts().iter().map(|&count| count > 0)))
    }

    /// Iterates over the tokens of a trace that belong to a unit: their requests, positions and units.
    pub(crate) fn tokens<'t>(&'t self, trace: &'t Trace) -> impl Iterator<Item = (TraceRequest<'t>, usize, usize)> {
        trace.iter().enumerate().flat_map(move |(index, request)| {
            request.tokens().filter_map(move |(position, token)| {
                let unit = match self {
                    UnitOf::Request(units) => units[index],
                    UnitOf::Token(units) => units[token.index()],
                };
                Some((request, position, unit? as usize))
            })
        })
    }
}

/// Numbers the units consecutively.
fn numbered(is_unit: impl Iterator<Item = bool>) -> Vec<Option<u32>> {
    let mut next = 0..;
    is_unit.map(|is_unit| if is_unit { next.next() } else { None }).collect()
}

/// Replaces the contents of `set` with the experts of a route.
pub(super) fn fill(set: &mut Vec<u16>, route: Route<'_>) {
    set.clear();
    set.extend(route.experts().map(|expert| expert.get()));
}

/// The distinct top-k sets of a layer.
#[derive(Debug)]
pub(crate) struct LayerRoutes {
    pub(crate) top_k: usize,
    /// [S, top_k], ascending within a set.
    experts: Vec<u16>,
    /// [S + 1] offsets into `uses`.
    start: Vec<usize>,
    /// Units and their occurrences, ascending within a set.
    uses: Vec<(u32, u32)>,
}

impl LayerRoutes {
    /// Counts the routes of one layer of a trace.
    pub(crate) fn count(trace: &Trace, layer: usize, unit_of: &UnitOf) -> Self {
        let mut sets: HashMap<Vec<u16>, u32> = HashMap::new();
        let mut routes =
            LayerRoutes { top_k: usize::from(trace.model().top_k), experts: vec![], start: vec![0], uses: vec![] };
        let mut occurrences: Vec<(u32, u32)> = Vec::new();
        let mut set = Vec::new();
        for (request, position, unit) in unit_of.tokens(trace) {
            let Some(route) = request.route(position, LayerIdx::new(layer as u16)) else { continue };
            fill(&mut set, route);
            set.sort_unstable();
            let next = sets.len() as u32;
            let id = sets.get(&set).copied().unwrap_or_else(|| {
                routes.experts.extend(&set);
                sets.insert(set.clone(), next);
                next
            });
            occurrences.push((id, unit as u32));
        }
        occurrences.sort_unstable();
        routes.collect(&occurrences, sets.len());
        routes
    }

    /// Aggregates sorted (set, unit) pairs into counts.
    fn collect(&mut self, occurrences: &[(u32, u32)], sets: usize) {
        let mut rest = occurrences;
        for set in 0..sets as u32 {
            let (of_set, after) = rest.split_at(rest.partition_point(|&(id, _)| id == set));
            rest = after;
            for same in of_set.chunk_by(|a, b| a == b) {
                self.uses.push((same[0].1, u32::try_from(same.len()).unwrap_or(u32::MAX)));
            }
            self.start.push(self.uses.len());
        }
    }

    /// S
    pub(crate) fn sets(&self) -> usize {
        self.start.len() - 1
    }

    pub(crate) fn set(&self, set: usize) -> &[u16] {
        &self.experts[set * self.top_k..(set + 1) * self.top_k]
    }

    pub(crate) fn uses(&self, set: usize) -> &[(u32, u32)] {
        &self.uses[self.start[set]..self.start[set + 1]]
    }

    pub(crate) fn occurrences(&self) -> u64 {
        self.uses.iter().map(|&(_, count)| u64::from(count)).sum()
    }

    /// Adds the number of each unit's occurrences that touch a group to `touched`, [U, G].
    pub(crate) fn add_touched(&self, group_of: &[u16], groups: usize, touched: &mut [u64]) {
        let mut seen = Vec::new();
        for set in 0..self.sets() {
            distinct_groups(self.set(set), group_of, &mut seen);
            for &(unit, count) in self.uses(set) {
                let row = &mut touched[unit as usize * groups..(unit as usize + 1) * groups];
                seen.iter().for_each(|&group| row[usize::from(group)] += u64::from(count));
            }
        }
    }

    /// Number of distinct groups, summed over all occurrences.
    pub(crate) fn distinct(&self, group_of: &[u16], groups: usize) -> u64 {
        let mut seen = Vec::with_capacity(groups);
        let of_set = |set: usize| {
            distinct_groups(self.set(set), group_of, &mut seen);
            seen.len() as u64 * self.uses(set).iter().map(|&(_, count)| u64::from(count)).sum::<u64>()
        };
        (0..self.sets()).map(of_set).sum()
    }
}

/// Writes the distinct groups of a set of experts to `seen`, ascending.
pub(super) fn distinct_groups(set: &[u16], group_of: &[u16], seen: &mut Vec<u16>) {
    seen.clear();
    seen.extend(set.iter().map(|&expert| group_of[usize::from(expert)]));
    seen.sort_unstable();
    seen.dedup();
}
