//! Evaluates attention tp in the steps that a unit runs: each layer's rows are spread evenly over the groups.

use semmoe_tables::{EvenGroups, LayerIdx, PlacedBy, Placement, Tables, TokenId, Trace, TraceRequest, group_shares};

use crate::judge::evaluate::{Evaluation, StepFigures};
use crate::judge::hosts::{Hosts, indices};
use crate::judge::tally::Tally;
use crate::judge::tokens::judged;
use crate::tables::{Half, MainGroups, PrintedRule};

/// A token of a step.
struct Row<'a> {
    request: TraceRequest<'a>,
    position: usize,
    half: Half,
    /// The token's true groups, known when a layer's rows are split because the routers of the previous layers have
    /// run.
    main: MainGroups,
}

/// Counts accumulated over the steps.
struct Judge<'a> {
    tables: &'a Tables,
    printed: &'a PrintedRule<'a>,
    hosts: &'a Hosts,
    tally: Tally,
    /// The rows split by T and A, by T without A, and by the paper's printed rule.
    evens: [EvenGroups; 3],
    /// Local activations of the rows split by T without A, and by the paper's printed rule.
    local: [f64; 2],
    /// The likeliest group of each row in the layer.
    wanted: Vec<Option<usize>>,
    links: Links,
    /// Rows of the fullest groups: as assigned, and with every row on its likeliest group.
    fullest: [u64; 2],
    /// Rows over the busiest links: as assigned, with every row on its likeliest group, and with rows kept in order.
    fullest_link: [u64; 3],
    moved: u64,
    rows: u64,
}

/// Evaluates the tokens of a trace that have a known route, in order, `step_tokens` per step.
pub(crate) fn judge(
    tables: &Tables,
    hosts: &Hosts,
    trace: &Trace,
    printed: &PrintedRule<'_>,
    step_tokens: usize,
) -> Evaluation {
    let mut judge = Judge::new(tables, hosts, printed);
    let mut tokens = 0;
    let mut step = Vec::new();
    for request in trace.iter() {
        let half = printed.half(request);
        for position in 0..request.token_ids().len() {
            let Some(row) = Row::new(tables.placement(), request, position, half) else { continue };
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
    /// Returns `None` if no route of the token is known in any layer.
    fn new(placement: &Placement, request: TraceRequest<'a>, position: usize, half: Half) -> Option<Self> {
        request.is_routed(position).then(|| {
            let mut main = MainGroups::new(placement);
            main.set(placement, request, position);
            Self { request, position, half, main }
        })
    }
}

impl<'a> Judge<'a> {
    fn new(tables: &'a Tables, hosts: &'a Hosts, printed: &'a PrintedRule<'a>) -> Self {
        Self {
            tables,
            printed,
            hosts,
            tally: Tally::new(hosts),
            evens: [(); 3].map(|()| EvenGroups::new(tables.groups())),
            local: [0.0; 2],
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

    /// Evaluates one layer of a step, for the rows whose route in that layer is known.
    fn layer(&mut self, layer: usize, rows: &[Row<'_>]) {
        let id = LayerIdx::new(layer as u16);
        let routes = || rows.iter().filter_map(|row| Some((row, row.request.route(row.position, id)?)));
        self.evens.iter_mut().for_each(EvenGroups::clear);
        self.wanted.clear();
        let [even, even_t_only, even_paper_rule] = &mut self.evens;
        for (row, _) in routes() {
            let token = TokenId::new(row.request.token_ids()[row.position]);
            let before = row.main.before(layer).map(|(older, newer)| (older.into(), newer.into()));
            even.push(|shares| {
                let likely = self.tables.group_shares(id, token, before, shares);
                self.wanted.push(likely.map(|likely| likely.group.index()));
                likely
            });
            even_t_only.push(|shares| self.tables.group_shares(id, token, None, shares));
            let labels = self.printed.labels(row.half, id, token, before);
            even_paper_rule.push(|shares| group_shares(labels, None, shares));
        }
        self.evens.iter_mut().for_each(EvenGroups::settle);
        let even = &self.evens[0];
        for (at, (_, route)) in routes().enumerate() {
            let [place, others @ ..] = self.evens.each_ref().map(|even| Some(usize::from(even.groups()[at])));
            for (local, place) in self.local.iter_mut().zip(others) {
                *local += self.hosts.local_of(id, route, place);
            }
            self.tally.add_route(self.hosts, layer, route, place);
            self.tally.add_tokens(layer, place, 1);
            self.moved += u64::from(even.placed_by(at) == PlacedBy::Evening);
        }
        let fullest = [even.fullest(), even.fullest_wanted()].map(u64::from);
        self.fullest.iter_mut().zip(fullest).for_each(|(sum, rows)| *sum += rows);
        let count = even.groups().len();
        let taken: Vec<usize> = even.groups().iter().map(|&group| group.into()).collect();
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

    /// Returns the places if every row is on its likeliest group. Rows without evidence are assigned last, to the
    /// groups with the fewest rows.
    fn as_wanted(&self) -> Vec<usize> {
        let mut counts = vec![0; self.hosts.places];
        self.wanted.iter().flatten().for_each(|&group| counts[group] += 1);
        let place = |wanted: &Option<usize>| {
            wanted.unwrap_or_else(|| {
                let place = (0..counts.len()).min_by_key(|&place| counts[place]).unwrap_or(0);
                counts[place] += 1;
                place
            })
        };
        self.wanted.iter().map(place).collect()
    }

    fn finish(self, tokens: u64, step_tokens: usize) -> Evaluation {
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
        let judged = judged(self.tables, self.hosts, &self.tally, tokens);
        let [lar_t_only, lar_paper_rule] = self.local.map(|local| Some(local / judged.activations as f64));
        Evaluation { lar_t_only, lar_paper_rule, steps: Some(steps), ..judged }
    }
}

/// Traffic between ranks in one layer of a step, where each collective waits for the busiest link. Counts, by place,
/// the rows assigned to it and the rows that it sends and receives in dispatch.
#[derive(Debug)]
struct Links {
    rows: Vec<u64>,
    sent: Vec<u64>,
    received: Vec<u64>,
    /// Scratch: the places of a route.
    seen: Vec<bool>,
}

impl Links {
    fn new(places: usize) -> Self {
        Self { rows: vec![0; places], sent: vec![0; places], received: vec![0; places], seen: Vec::new() }
    }

    fn clear(&mut self) {
        for counts in [&mut self.rows, &mut self.sent, &mut self.received] {
            counts.fill(0);
        }
    }

    /// Adds a token at `place` with these experts.
    fn add(&mut self, hosts: &Hosts, layer: usize, experts: impl Iterator<Item = usize>, place: usize) {
        self.rows[place] += 1;
        self.sent[place] += hosts.sent_to(layer, experts, place, &mut self.seen) as u64;
        self.received.iter_mut().zip(&self.seen).for_each(|(received, seen)| *received += u64::from(*seen));
    }

    /// Returns the rows over the busiest link, in its busier direction, summed over SRS, SAG, dispatch and combine. SRS
    /// sends one row from each other place to a token's place; SAG and combine are SRS and dispatch reversed.
    fn fullest(&self) -> u64 {
        let (all, others) = (self.rows.iter().sum::<u64>(), self.rows.len() as u64 - 1);
        let shuffled = self.rows.iter().map(|&own| (others * own).max(all - own)).max();
        let dispatched = self.sent.iter().chain(&self.received).copied().max();
        2 * (shuffled.unwrap_or(0) + dispatched.unwrap_or(0))
    }
}

#[cfg(test)]
mod tests;
