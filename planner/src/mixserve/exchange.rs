//! How much travels between ranks of the experts.

use crate::cluster::{Cluster, Group};

/// Copies of tokens that leave each rank for others in one dispatch (equation 5): `b / max(d_DP, d_EP) k (d - 1) / d`
/// with `d = min(d_DP, d_EP)`. With fewer data-parallel groups than expert groups, hidden states are there several
/// times, and each of the ranks that have a token drops what another one sends.
#[must_use]
pub fn copies_leaving(tokens: f64, top_k: f64, data_parallel: u64, expert_parallel: u64) -> f64 {
    let members = data_parallel.min(expert_parallel) as f64;
    tokens / data_parallel.max(expert_parallel) as f64 * top_k * (members - 1.0) / members
}

/// A decoder layer on nodes whose GPUs share attention by TP.
#[derive(Clone, Copy, Debug)]
pub struct HybridUnit {
    /// Tokens of a node.
    pub tokens: f64,
    /// Bytes of a hidden state.
    pub hidden_bytes: f64,
    /// k.
    pub top_k: f64,
    /// GPUs of a node.
    pub node_gpus: u64,
    /// Nodes.
    pub nodes: u64,
}

/// Seconds of communication of one decoder layer, TP inside nodes and EP between them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HybridTimes {
    /// Equation 12 as printed: every GPU of a node sends every token's copies itself.
    pub ep_printed: f64,
    /// Equation 13 as printed: RS-A2A-AG, one step after the other.
    pub hybrid_printed: f64,
    /// EP over all GPUs with each GPU sending its slice of the tokens, as engines do.
    pub ep_sliced: f64,
    /// RS-A2A-AG with the allgather inside nodes hidden behind the all-to-all between them, or the other way round.
    pub hybrid_overlapped: f64,
}

/// Equations 12 and 13 on the two innermost levels of a cluster, and what remains of the gain against a baseline
/// without redundancy.
#[must_use]
pub fn hybrid_times(unit: &HybridUnit, cluster: &Cluster) -> HybridTimes {
    let inside = cluster.span(Group { size: unit.node_gpus, stride: 1 });
    let between = cluster.span(Group { size: unit.nodes, stride: unit.node_gpus });
    let all = cluster.span(Group { size: unit.node_gpus * unit.nodes, stride: 1 });
    let whole = unit.tokens * unit.hidden_bytes;
    let routed = whole * unit.top_k;
    let slice = routed / unit.node_gpus as f64;
    let reduce = inside.all_reduce(whole);
    let gather = inside.scatter(routed);
    let exchange = between.all_to_all(slice);
    HybridTimes {
        ep_printed: reduce + 2.0 * between.all_to_all(routed),
        hybrid_printed: reduce + gather + 2.0 * exchange,
        ep_sliced: reduce + 2.0 * all.all_to_all(slice),
        hybrid_overlapped: reduce + gather.max(2.0 * exchange),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::h200;

    #[test]
    fn golden_copies() {
        for (dp, ep, copies) in [(4, 4, 24.0), (8, 4, 12.0), (4, 8, 12.0)] {
            assert_eq!(copies_leaving(16.0, 8.0, dp, ep), copies);
        }
    }

    /// b 16, s 1, h 7168, k 8, 2 x 8 GPUs, 450 and 50 GB/s, no latency; microseconds.
    #[test]
    fn golden_hybrid_times() {
        let mut cluster = h200(2);
        cluster.levels.iter_mut().for_each(|level| level.latency = 0.0);
        let unit = HybridUnit { tokens: 16.0, hidden_bytes: 7168.0 * 2.0, top_k: 8.0, node_gpus: 8, nodes: 2 };
        let times = hybrid_times(&unit, &cluster);
        let golden = [
            (times.ep_printed, 37.59),
            (times.hybrid_printed, 9.05),
            (times.ep_sliced, 5.93),
            (times.hybrid_overlapped, 5.48),
        ];
        for (found, microseconds) in golden {
            assert!((found * 1e6 - microseconds).abs() < 0.005, "{found}");
        }
    }
}
