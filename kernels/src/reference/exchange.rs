//! Dispatch and combine of expert parallelism, over all ranks at once.

use crate::element::Element;
use crate::error::{KernelError, check_len};

/// In place of an expert: the slot is not used. As an input it is skipped; answers are padded with it.
pub const NO_EXPERT: i32 = -1;

/// In place of a row: the token was not sent to this rank.
pub const NO_ROW: i32 = -1;

/// The tokens of one rank with their routes; n may differ from rank to rank.
#[derive(Clone, Copy, Debug)]
pub struct RoutedTokens<'a, T> {
    /// `[n, H]`
    pub x: &'a [T],
    /// `[n, k]`: expert ids, each below N or [`NO_EXPERT`]; one token's are distinct.
    pub experts: &'a [i32],
    /// `[n, k]`: router weights.
    pub weights: &'a [f32],
}

/// What one rank has after a dispatch: R rows from all ranks.
#[derive(Clone, PartialEq, Debug)]
pub struct Dispatched<T> {
    /// `[P + 1]`: the rows `source_offsets[p]..source_offsets[p + 1]` came from rank p, in the order of its tokens.
    pub source_offsets: Vec<u32>,
    /// `[R, H]`: each token once, however many of its experts are here.
    pub rows: Vec<T>,
    /// `[R]`: the token's index on the rank it came from.
    pub tokens: Vec<u32>,
    /// `[R, k]`: the token's experts that are on this rank, in the router's order, then [`NO_EXPERT`].
    pub experts: Vec<i32>,
    /// `[R, k]`: their weights, then 0.
    pub weights: Vec<f32>,
    /// `[n, P]`: for this rank's own tokens, the row of rank q that each became, or [`NO_ROW`]: what combine needs.
    pub sent_rows: Vec<i32>,
}

/// Sends every token once to each rank that hosts at least one of its experts, the own rank included.
/// `rank_of_expert` is `[N]`; P is the number of elements of `tokens`.
///
/// # Errors
/// Lengths that do not fit, an expert or a rank out of range.
pub fn dispatch<T: Element>(
    tokens: &[RoutedTokens<'_, T>],
    hidden: usize,
    top_k: usize,
    rank_of_expert: &[u32],
) -> Result<Vec<Dispatched<T>>, KernelError> {
    let ranks = tokens.len();
    check_hosts("rank of expert", rank_of_expert, ranks)?;
    check_tokens(tokens, hidden, top_k, rank_of_expert.len())?;
    let count = |source: &RoutedTokens<'_, T>| source.experts.len() / top_k;
    let mut answer: Vec<Dispatched<T>> = tokens
        .iter()
        .map(|source| Dispatched {
            source_offsets: vec![0],
            rows: Vec::new(),
            tokens: Vec::new(),
            experts: Vec::new(),
            weights: Vec::new(),
            sent_rows: vec![NO_ROW; count(source) * ranks],
        })
        .collect();
    for (here, source) in tokens.iter().enumerate() {
        for token in 0..count(source) {
            for there in 0..ranks {
                let slots = slots_at(source.experts, token * top_k..(token + 1) * top_k, rank_of_expert, there);
                if slots.is_empty() {
                    continue;
                }
                answer[here].sent_rows[token * ranks + there] = answer[there].tokens.len() as i32;
                let to = &mut answer[there];
                to.tokens.push(token as u32);
                to.rows.extend_from_slice(&source.x[token * hidden..][..hidden]);
                to.experts.extend(slots.iter().map(|&slot| source.experts[slot]));
                to.experts.resize(to.tokens.len() * top_k, NO_EXPERT);
                to.weights.extend(slots.iter().map(|&slot| source.weights[slot]));
                to.weights.resize(to.tokens.len() * top_k, 0.0);
            }
        }
        for to in &mut answer {
            to.source_offsets.push(to.tokens.len() as u32);
        }
    }
    Ok(answer)
}

/// Brings the rows' results home: `out_p[t] = sum over q of sums[q][sent_rows_p[t, q]]`, over the ranks q that the
/// token was sent to, in order, in f32, beginning with the first one's value, rounded once. A token that was sent
/// nowhere gets zeros.
///
/// - `sums[q]` `[R_q, H]`: for each row that q received, the sum of weight x expert(row) over its experts there
/// - `sent_rows[p]` `[n_p, P]`: from [`dispatch`]
///
/// # Errors
/// Lengths that do not fit, a row that a rank does not have.
pub fn combine<T: Element>(sums: &[&[T]], sent_rows: &[&[i32]], hidden: usize) -> Result<Vec<Vec<T>>, KernelError> {
    let ranks = sums.len();
    check_len("sent rows", sent_rows.len(), ranks)?;
    let mut answer = Vec::new();
    for sent in sent_rows {
        check_len("sent rows of a rank", sent.len(), sent.len() / ranks * ranks)?;
        let mut out = Vec::new();
        for sent in sent.chunks_exact(ranks) {
            for (rank, &row) in sent.iter().enumerate().filter(|(_, row)| **row != NO_ROW) {
                let bound = sums[rank].len().checked_div(hidden).unwrap_or(usize::MAX);
                if row < 0 || row as usize >= bound {
                    let found = row as u32 as usize;
                    return Err(KernelError::OutOfRange { what: "row of rank", index: rank, found, bound });
                }
            }
            for column in 0..hidden {
                let values = sent.iter().zip(sums).filter(|(row, _)| **row != NO_ROW);
                let values = values.map(|(&row, sums)| sums[row as usize * hidden + column].widen());
                out.push(values.reduce(|sum, value| sum + value).map_or(T::zeroed(), T::round));
            }
        }
        answer.push(out);
    }
    Ok(answer)
}

/// Those of a token's slots whose expert is at one place.
pub(super) fn slots_at(
    experts: &[i32],
    slots: std::ops::Range<usize>,
    place_of_expert: &[u32],
    place: usize,
) -> Vec<usize> {
    let is_there = |expert: i32| expert != NO_EXPERT && place_of_expert[expert as usize] as usize == place;
    slots.filter(|&slot| is_there(experts[slot])).collect()
}

fn below(what: &'static str, index: usize, found: usize, bound: usize) -> Result<(), KernelError> {
    match found < bound {
        true => Ok(()),
        false => Err(KernelError::OutOfRange { what, index, found, bound }),
    }
}

pub(super) fn check_hosts(what: &'static str, host_of_expert: &[u32], hosts: usize) -> Result<(), KernelError> {
    host_of_expert.iter().enumerate().try_for_each(|(expert, &host)| below(what, expert, host as usize, hosts))
}

pub(super) fn check_tokens<T: Element>(
    tokens: &[RoutedTokens<'_, T>],
    hidden: usize,
    top_k: usize,
    experts: usize,
) -> Result<(), KernelError> {
    if tokens.is_empty() {
        return Err(KernelError::NoRanks);
    }
    if top_k == 0 {
        return Err(KernelError::OutOfRange { what: "top-k", index: 0, found: 0, bound: 0 });
    }
    for source in tokens {
        let count = source.experts.len() / top_k;
        check_len("experts", source.experts.len(), count * top_k)?;
        check_len("weights", source.weights.len(), count * top_k)?;
        check_len("x", source.x.len(), count * hidden)?;
        for (index, &expert) in source.experts.iter().enumerate().filter(|(_, expert)| **expert != NO_EXPERT) {
            below("expert", index, expert as u32 as usize, experts)?;
        }
    }
    Ok(())
}
