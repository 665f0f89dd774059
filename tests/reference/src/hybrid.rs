//! Dispatch and combine of hybrid TP-EP over all ranks at once: an expert belongs to a node, and each of the node's P
//! ranks has a slice of it, so the ranks' results sum to the expert's.

use semmoe_kernels::{Element, KernelError, NodeGrid, RoutedTokens, check_below, check_len};

use crate::exchange::{Hosts, add, deliver};

/// The rows of every rank of one node after a hybrid dispatch: R rows, ordered by the source's local index, then its
/// node, then token.
#[derive(Clone, PartialEq, Debug)]
pub struct NodeRows<T> {
    /// `[R]`: the source rank of each row.
    pub sources: Vec<u32>,
    /// `[R]`: the token's index on that rank.
    pub tokens: Vec<u32>,
    /// `[R, H]`: each token once, however many of its experts are on the node.
    pub rows: Vec<T>,
    /// `[R, k]`: the token's experts that are on the node, in the router's order, then
    /// [`NO_EXPERT`](semmoe_kernels::NO_EXPERT).
    pub experts: Vec<i32>,
    /// `[R, k]`: their weights, then 0.
    pub weights: Vec<f32>,
}

/// Sends every token to all ranks of each node that has at least one of its experts, including its own node.
/// `node_of_expert` is `[N]`; element b of the result is for each rank of node b.
///
/// # Errors
/// Inconsistent lengths, an expert or a node out of range.
pub fn hybrid_dispatch<T: Element>(
    tokens: &[RoutedTokens<'_, T>],
    hidden: usize,
    top_k: usize,
    node_of_expert: &[u32],
    grid: NodeGrid,
) -> Result<Vec<NodeRows<T>>, KernelError> {
    check_len("ranks", tokens.len(), grid.ranks())?;
    let sources: Vec<usize> = (0..grid.width()).flat_map(|local| grid.across(local)).collect();
    let hosts = Hosts { what: "node of expert", of_expert: node_of_expert, count: grid.nodes() };
    deliver(tokens, &sources, hidden, top_k, hosts)
}

/// Returns the rows' results to their tokens. Within a node the ranks' sums are added in the order of local indices, in
/// f32, starting with the first value, and rounded once. A token's result sums these over the nodes that it was sent
/// to, in node order, again in f32 and rounded once. A token that was sent nowhere gets zeros.
///
/// - `sums[r]` `[R_b, H]`: for each row of r's node b, the sum of weight x slice(row) over its experts there
/// - `rows[b]`: from [`hybrid_dispatch`]
/// - `counts[r]`: tokens of rank r
///
/// # Errors
/// Inconsistent lengths, a row whose token a rank does not have.
pub fn hybrid_combine<T: Element>(
    sums: &[&[T]],
    rows: &[NodeRows<T>],
    counts: &[usize],
    hidden: usize,
    grid: NodeGrid,
) -> Result<Vec<Vec<T>>, KernelError> {
    check_len("sums", sums.len(), grid.ranks())?;
    check_len("counts", counts.len(), grid.ranks())?;
    check_len("nodes", rows.len(), grid.nodes())?;
    // By rank and token: the sum of each node, in the order of nodes.
    let mut of_nodes: Vec<Vec<Vec<Vec<T>>>> = counts.iter().map(|&count| vec![Vec::new(); count]).collect();
    for (node, rows) in rows.iter().enumerate() {
        for rank in grid.inside(node) {
            check_len("sums of a rank", sums[rank].len(), rows.tokens.len() * hidden)?;
        }
        for (row, (&source, &token)) in rows.sources.iter().zip(&rows.tokens).enumerate() {
            let bound = counts.get(source as usize).copied().unwrap_or_default();
            check_below("token of row", row, token as usize, bound)?;
            let sum = (0..hidden).map(|column| add(grid.inside(node).map(|rank| sums[rank][row * hidden + column])));
            of_nodes[source as usize][token as usize].push(sum.collect());
        }
    }
    let home = |of_nodes: &Vec<Vec<T>>| -> Vec<T> {
        (0..hidden).map(|column| add(of_nodes.iter().map(|sum| sum[column]))).collect()
    };
    Ok(of_nodes.iter().map(|tokens| tokens.iter().flat_map(home).collect()).collect())
}
