//! Dispatch and combine of expert parallelism, over all ranks at once.

use semmoe_kernels::{Element, KernelError, NO_EXPERT, NO_ROW, RoutedTokens, check_below, check_len};

use crate::hybrid::NodeRows;

/// One rank's rows after a dispatch: R rows from all ranks.
#[derive(Clone, PartialEq, Debug)]
pub struct Dispatched<T> {
    /// `[P + 1]`: the rows `source_offsets[p]..source_offsets[p + 1]` came from rank p, in the order of its tokens.
    pub source_offsets: Vec<u32>,
    /// `[R, H]`: each token once, however many of its experts are here.
    pub rows: Vec<T>,
    /// `[R]`: the token's index on the rank it came from.
    pub tokens: Vec<u32>,
    /// `[R]`: the token's index on its source rank.
    pub experts: Vec<i32>,
    /// `[R, k]`: their weights, then 0.
    pub weights: Vec<f32>,
    /// `[n, P]`: for each of this rank's own tokens, its row on rank q, or [`NO_ROW`]; needed by combine.
    pub sent_rows: Vec<i32>,
}

/// Sends every token once to each rank that hosts at least one of its experts, including its own rank. `rank_of_expert`
/// is `[N]`; P is the length of `tokens`.
///
/// # Errors
/// Inconsistent lengths, an expert or a rank out of range.
pub fn dispatch<T: Element>(
    tokens: &[RoutedTokens<'_, T>],
    hidden: usize,
    top_k: usize,
    rank_of_expert: &[u32],
) -> Result<Vec<Dispatched<T>>, KernelError> {
    let ranks = tokens.len();
    let hosts = Hosts { what: "rank of expert", of_expert: rank_of_expert, count: ranks };
    let arrived = deliver(tokens, &(0..ranks).collect::<Vec<_>>(), hidden, top_k, hosts)?;
    let mut sent_rows: Vec<Vec<i32>> =
        tokens.iter().map(|source| vec![NO_ROW; source.experts.len() / top_k * ranks]).collect();
    for (there, rows) in arrived.iter().enumerate() {
        for (row, (&source, &token)) in (0..).zip(rows.sources.iter().zip(&rows.tokens)) {
            sent_rows[source as usize][token as usize * ranks + there] = row;
        }
    }
    let answer = arrived.into_iter().zip(sent_rows).map(|(arrived, sent_rows)| {
        let NodeRows { sources, tokens, rows, experts, weights } = arrived;
        let before = |rank: usize| sources.partition_point(|&source| (source as usize) < rank) as u32;
        Dispatched { source_offsets: (0..=ranks).map(before).collect(), rows, tokens, experts, weights, sent_rows }
    });
    Ok(answer.collect())
}

/// Returns the rows' results to their tokens: `out_p[t] = sum over q of sums[q][sent_rows_p[t, q]]` over the ranks q
/// that the token was sent to, in rank order, in f32, starting with the first value, rounded once. A token that was
/// sent nowhere gets zeros.
///
/// - `sums[q]` `[R_q, H]`: for each row that q received, the sum of weight x expert(row) over its experts there
/// - `sent_rows[p]` `[n_p, P]`: from [`dispatch`]
///
/// # Errors
/// Inconsistent lengths, a row that a rank does not have.
pub fn combine<T: Element>(sums: &[&[T]], sent_rows: &[&[i32]], hidden: usize) -> Result<Vec<Vec<T>>, KernelError> {
    let ranks = sums.len();
    check_len("sent rows", sent_rows.len(), ranks)?;
    let mut answer = Vec::new();
    for sent in sent_rows {
        check_len("sent rows of a rank", sent.len(), sent.len() / ranks * ranks)?;
        let mut out = Vec::new();
        for sent in sent.chunks_exact(ranks) {
            let sent = || sent.iter().enumerate().filter(|(_, row)| **row != NO_ROW);
            for (rank, &row) in sent() {
                let bound = sums[rank].len().checked_div(hidden).unwrap_or(usize::MAX).min(i32::MAX as usize);
                check_below("row of rank", rank, row as u32 as usize, bound)?;
            }
            let value = |column| add(sent().map(|(rank, &row)| sums[rank][row as usize * hidden + column]));
            out.extend((0..hidden).map(value));
        }
        answer.push(out);
    }
    Ok(answer)
}

/// Sums in f32 in order, rounded once; zero without values.
pub(super) fn add<T: Element>(values: impl Iterator<Item = T>) -> T {
    values.map(T::widen).reduce(|sum, value| sum + value).map_or(T::zeroed(), T::round)
}

/// The ranks or nodes that host experts.
pub(super) struct Hosts<'a> {
    /// The name of `of_expert` in errors.
    pub(super) what: &'static str,
    /// `[N]`
    pub(super) of_expert: &'a [u32],
    pub(super) count: usize,
}

/// The rows of every host, ordered by source and then by token.
pub(super) fn deliver<T: Element>(
    tokens: &[RoutedTokens<'_, T>],
    sources: &[usize],
    hidden: usize,
    top_k: usize,
    hosts: Hosts<'_>,
) -> Result<Vec<NodeRows<T>>, KernelError> {
    for (expert, &host) in hosts.of_expert.iter().enumerate() {
        check_below(hosts.what, expert, host as usize, hosts.count)?;
    }
    if tokens.is_empty() {
        return Err(KernelError::NoRanks);
    }
    tokens.iter().try_for_each(|source| source.check(hidden, top_k, hosts.of_expert.len()))?;
    let mut answer = Vec::new();
    for host in 0..hosts.count {
        let mut to = NodeRows { sources: vec![], tokens: vec![], rows: vec![], experts: vec![], weights: vec![] };
        let is_here = |expert: i32| expert != NO_EXPERT && hosts.of_expert[expert as usize] as usize == host;
        for &rank in sources {
            let source = &tokens[rank];
            for (token, experts) in source.experts.chunks_exact(top_k).enumerate() {
                let slots: Vec<usize> = (0..top_k).filter(|&slot| is_here(experts[slot])).collect();
                if slots.is_empty() {
                    continue;
                }
                to.sources.push(rank as u32);
                to.tokens.push(token as u32);
                to.rows.extend_from_slice(&source.x[token * hidden..][..hidden]);
                to.experts.extend(slots.iter().map(|&slot| experts[slot]));
                to.experts.resize(to.tokens.len() * top_k, NO_EXPERT);
                to.weights.extend(slots.iter().map(|&slot| source.weights[token * top_k + slot]));
                to.weights.resize(to.tokens.len() * top_k, 0.0);
            }
        }
        answer.push(to);
    }
    Ok(answer)
}
