//! The paper's Algorithm 3 as it is printed, a baseline: in its line 2, `cond(T_p > A_p)`, a token goes where the surer
//! of T and A says, and what the other knows is lost.
//!
//! The paper's A_p is a plain share: how much of what tokens activate in a layer lies on a group, given their groups in
//! the two layers before. Our own A is tempered by what T knows already (`transitions`), so that its shares say nothing
//! about who is surer.

use half::f16;
use semmoe_tables::{GroupId, GroupLabels, LayerIdx, Placement, PromptSplit, Tables, TokenId, Trace, TraceRequest};

use crate::labels::{Labels, labels_of};
use crate::transitions::Counts;

/// In the text about the solver of tables of the paper's algorithm, whose A is A_p.
pub(crate) const BY_PAPER: &str = "algorithm=paper";

/// A and A_p, counted: one label for every pair of groups, [L, G, G, 1].
#[derive(Debug)]
pub(crate) struct Sequences {
    groups: usize,
    pub(crate) labels: Labels,
}

impl Sequences {
    /// Counts the requests of a trace that `keep` keeps.
    pub(crate) fn of(trace: &Trace, placement: &Placement, keep: impl Fn(TraceRequest<'_>) -> bool) -> Self {
        let requests = trace.iter().filter(|request| keep(*request));
        let counts = Counts::of(requests, trace.model().top_k, placement);
        let share = |counts: &[u64], shares: &mut [f64]| {
            let sum = counts.iter().sum::<u64>() as f64;
            shares.iter_mut().zip(counts).for_each(|(share, &count)| *share = count as f64 / sum);
        };
        Self { groups: placement.groups().into(), labels: counts.labels(1, |_, counts, shares| share(counts, shares)) }
    }

    fn after(&self, layer: LayerIdx, older: GroupId, newer: GroupId) -> Option<GroupLabels<'_>> {
        let row = (layer.index() * self.groups + older.index()) * self.groups + newer.index();
        labels_of(&self.labels.group, &self.labels.prob, 1, row)
    }
}

/// Where A_p comes from.
enum Table {
    /// The tables, which are the paper's.
    Own,
    /// Requests that were solved on.
    Counted(Sequences),
    /// Halves of the requests judged, each by what the other half has counted.
    Halves([Sequences; 2]),
}

/// Algorithm 3 for given tables.
pub(crate) struct PrintedRule<'a> {
    tables: &'a Tables,
    table: Table,
}

/// A request as the rule sees it: which half counts for it.
#[derive(Clone, Copy, Default)]
pub(crate) struct Half(usize);

impl<'a> PrintedRule<'a> {
    /// A_p is counted in `solved_on`, where that is known, else in the trace that is judged itself.
    pub(crate) fn new(tables: &'a Tables, judged: &Trace, solved_on: Option<&Trace>) -> Self {
        let placement = tables.placement();
        let table = match solved_on {
            _ if tables.solver().split(' ').any(|word| word == BY_PAPER) => Table::Own,
            Some(trace) => Table::Counted(Sequences::of(trace, placement, |_| true)),
            None => {
                let other = |half| Sequences::of(judged, placement, |request| half_of(request) != half);
                Table::Halves([0, 1].map(other))
            }
        };
        Self { tables, table }
    }

    /// Looks at a request.
    pub(crate) fn half(&self, request: TraceRequest<'_>) -> Half {
        Half(if matches!(self.table, Table::Halves(_)) { half_of(request) } else { 0 })
    }

    /// The labels that a token goes by.
    pub(crate) fn labels(
        &self,
        half: Half,
        layer: LayerIdx,
        token: TokenId,
        before: Option<(GroupId, GroupId)>,
    ) -> Option<GroupLabels<'_>> {
        let by_groups = before.and_then(|(older, newer)| match &self.table {
            Table::Own => self.tables.next_groups(layer, older, newer),
            Table::Counted(table) => table.after(layer, older, newer),
            Table::Halves(tables) => tables[half.0].after(layer, older, newer),
        });
        let sure = |labels: GroupLabels<'_>| -> f16 { labels.probs[0] };
        match (self.tables.token_groups(layer, token), by_groups) {
            (Some(by_token), Some(by_groups)) => {
                Some(if sure(by_token) > sure(by_groups) { by_token } else { by_groups })
            }
            (one, other) => one.or(other),
        }
    }
}

fn half_of(request: TraceRequest<'_>) -> usize {
    usize::from(PromptSplit::EVALUATE.position(request) < 0.5)
}
