//! The paper's Algorithm 3 as printed, as a baseline: in its line 2, `cond(T_p > A_p)`, a token follows whichever of T
//! and A is more confident, and the other's information is lost.
//!
//! The paper's A_p is a plain share: the fraction of a layer's activations on a group, given the tokens' groups in the
//! two previous layers. Our own A is tempered by the information that T already has (`transitions`), so its shares do
//! not show which of the two is more confident.

use half::f16;
use semmoe_tables::{GroupId, GroupLabels, LayerIdx, Placement, PromptSplit, Tables, TokenId, Trace, TraceRequest};

use crate::tables::labels::{Labels, labels_of};
use crate::tables::transitions::Counts;

/// Marks tables made by the paper's algorithm in the `solver` field; their A is A_p.
pub(crate) const BY_PAPER: &str = "algorithm=paper";

/// A and A_p, counted on requests: one label for every pair of groups, [L, G, G, 1].
#[derive(Debug)]
pub(crate) struct Sequences {
    groups: usize,
    pub(crate) labels: Labels,
}

impl Sequences {
    /// Counts the requests of a trace selected by `keep`.
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

/// The source of A_p.
enum Table {
    /// A in the evaluated tables, which were made by the paper's algorithm.
    Own,
    /// Counts on the requests that were solved on.
    Counted(Sequences),
    /// Two halves of the evaluated requests; each half's counts are used for the other.
    Halves([Sequences; 2]),
}

/// Algorithm 3, applied to given tables.
pub(crate) struct PrintedRule<'a> {
    tables: &'a Tables,
    table: Table,
}

/// The half of the trace whose counts apply to a request.
#[derive(Clone, Copy, Default)]
pub(crate) struct Half(usize);

impl<'a> PrintedRule<'a> {
    /// Counts A_p on `solved_on` if it is known, otherwise on the evaluated trace itself.
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

    /// Returns the half whose counts apply to a request.
    pub(crate) fn half(&self, request: TraceRequest<'_>) -> Half {
        Half(if matches!(self.table, Table::Halves(_)) { half_of(request) } else { 0 })
    }

    /// Returns the labels that the rule selects for a token.
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
