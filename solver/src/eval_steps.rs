//! Evaluation of attention tp in steps, as a unit runs them: the rows of a layer go to the groups in even parts.

use semmoe_tables::{EvenGroups, LayerIdx, PlacedBy, Placement, Tables, TokenId, Trace, TraceRequest, group_shares};

use crate::eval_tokens::{TokenLoads, judged, paper_labels};
use crate::evaluate::{Judged, StepFigures};
use crate::hosts::{Hosts, indices};
use crate::labels::MainGroups;
use crate::links::Links;
use crate::tally::Tally;

/// A token of a step.
struct Row<'a> {
    request: TraceRequest<'a>,
    position: usize,
    /// Its true groups: when a layer's rows are split the routers of the layers before have run.
    main: MainGroups,
}

/// The counts so far.
struct Judge<'a> {
    tables: &'a Tables,
    hosts: &'a Hosts,
    tally: Tally,
    loads: TokenLoads,
    /// Local activations with rows split by T alone.
    local_t_only: f64,
    /// The same by the paper's printed rule.
    local_paper_rule: f64,
    even: EvenGroups,
    even_t_only: EvenGroups,
    even_paper_rule: EvenGroups,
    /// The likeliest group of each row of the layer.
    wanted: Vec<Option<usize>>,
    links: Links,
    /// Rows of the fullest groups, as they are and if no row had moved.
    fullest: [u64; 2],
    /// Rows over the fullest links, in the same two cases and if rows stayed in their order.
    fullest_link: [u64; 3],
    moved: u64,
    rows: u64,
}

/// The tokens of a trace with a known route, in their order, so many in each step.
pub(crate) fn judge(tables: &Tables, hosts: &Hosts, trace: &Trace, step_tokens: usize) -> Judged {
    let mut judge = Judge::new(tables, hosts);
    let mut tokens = 0;
    let mut step = Vec::new();
    for request in trace.iter() {
        for position in 0..request.token_ids().len() {
            let Some(row) = Row::new(tables.placement(), request, position) else { continue };
            step.push(row);
            tokens += 1;
            if step.len() == step_tokens {
                judge.step(&step);
                step.clear();
            }
        }
    }
    judge.step(&step);
    judge.finish(tokens, step_tokens)
}

impl<'a> Row<'a> {
    /// `None` where no layer's route is known.
    fn new(placement: &Placement, request: TraceRequest<'a>, position: usize) -> Option<Self> {
        request.is_routed(position).then(|| {
            let mut main = MainGroups::new(placement);
            main.set(placement, request, position);
            Self { request, position, main }
        })
    }
}

impl<'a> Judge<'a> {
    fn new(tables: &'a Tables, hosts: &'a Hosts) -> Self {
        let even = EvenGroups::new(tables.groups());
        Self {
            tables,
            hosts,
            tally: Tally::new(hosts),
            loads: TokenLoads::new(hosts),
            local_t_only: 0.0,
            local_paper_rule: 0.0,
            even_t_only: even.clone(),
            even_paper_rule: even.clone(),
            even,
            wanted: Vec::new(),
            links: Links::new(hosts.places),
            fullest: [0; 2],
            fullest_link: [0; 3],
            moved: 0,
            rows: 0,
        }
    }

    fn step(&mut self, rows: &[Row<'_>]) {
        (0..self.hosts.layers).for_each(|layer| self.layer(layer, rows));
    }

    /// One layer of a step: the rows whose route is known there.
    fn layer(&mut self, layer: usize, rows: &[Row<'_>]) {
        let id = LayerIdx::new(layer as u16);
        let routes = || rows.iter().filter_map(|row| Some((row, row.request.route(row.position, id)?)));
        self.even.clear();
        self.even_t_only.clear();
        self.even_paper_rule.clear();
        self.wanted.clear();
        for (row, _) in routes() {
            let token = TokenId::new(row.request.token_ids()[row.position]);
            let before = row.main.before(layer).map(|(older, newer)| (older.into(), newer.into()));
            self.even.push(|shares| {
                let likely = self.tables.group_shares(id, token, before, shares);
                self.wanted.push(likely.map(|likely| likely.group.index()));
                likely
            });
            self.even_t_only.push(|shares| self.tables.group_shares(id, token, None, shares));
            let labels = paper_labels(self.tables, id, token, before);
            self.even_paper_rule.push(|shares| group_shares(labels, None, shares));
        }
        let evens = [&mut self.even, &mut self.even_t_only, &mut self.even_paper_rule];
        evens.into_iter().for_each(EvenGroups::settle);
        for (at, (_, route)) in routes().enumerate() {
            let evens = [&self.even, &self.even_t_only, &self.even_paper_rule];
            let [place, by_t, by_paper] = evens.map(|even| Some(usize::from(even.groups()[at])));
            self.local_t_only += self.hosts.local_of(id, route, by_t);
            self.local_paper_rule += self.hosts.local_of(id, route, by_paper);
            self.tally.add_route(self.hosts, layer, indices(route), place);
            self.loads.add(layer, place, 1);
            self.moved += u64::from(self.even.placed_by(at) == PlacedBy::Evening);
        }
        let fullest = [self.even.fullest(), self.even.fullest_wanted()].map(u64::from);
        self.fullest.iter_mut().zip(fullest).for_each(|(sum, rows)| *sum += rows);
        let count = self.even.groups().len();
        let taken: Vec<usize> = self.even.groups().iter().map(|&group| group.into()).collect();
        let in_order = (0..count).map(|at| at * self.hosts.places / count).collect();
        for (kind, places) in [taken, self.as_wanted(), in_order].iter().enumerate() {
            self.links.clear();
            for ((_, route), &place) in routes().zip(places) {
                self.links.add(self.hosts, layer, indices(route), place);
            }
            self.fullest_link[kind] += self.links.fullest();
        }
        self.rows += count as u64;
    }

    /// Every row on its likeliest group; those of which nothing is known come last, where the fewest are.
    fn as_wanted(&self) -> Vec<usize> {
        let mut counts = vec![0; self.hosts.places];
        self.wanted.iter().flatten().for_each(|&group| counts[group] += 1);
        let least =
            |counts: &[u64]| (1..counts.len()).fold(0, |l, next| if counts[next] < counts[l] { next } else { l });
        let place = |wanted: &Option<usize>| {
            wanted.unwrap_or_else(|| {
                let place = least(&counts);
                counts[place] += 1;
                place
            })
        };
        self.wanted.iter().map(place).collect()
    }

    fn finish(self, tokens: u64, step_tokens: usize) -> Judged {
        let activations: u64 = self.tally.activations.iter().sum();
        let per_row = |count: u64| count as f64 / self.rows as f64;
        let [fullest_group, fullest_group_wanted] = self.fullest.map(|rows| self.hosts.groups as f64 * per_row(rows));
        let [fullest_link, fullest_link_wanted, fullest_link_unshuffled] = self.fullest_link.map(per_row);
        let steps = StepFigures {
            step_tokens,
            fullest_group,
            fullest_group_wanted,
            moved: per_row(self.moved),
            fullest_link,
            fullest_link_wanted,
            fullest_link_unshuffled,
        };
        let lar_t_only = Some(self.local_t_only / activations as f64);
        let lar_paper_rule = Some(self.local_paper_rule / activations as f64);
        Judged { lar_t_only, lar_paper_rule, steps: Some(steps), ..judged(self.tally, &self.loads, tokens) }
    }
}

#[cfg(test)]
#[path = "eval_steps_tests.rs"]
mod tests;
