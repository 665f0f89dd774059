//! The levels that a group of `size` ranks crosses, whose GPUs are `stride` apart.

use super::{Cluster, Level, Measured, Operator};

/// Ranks that participate in a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Ranks.
    pub size: u64,
    /// Distance between members in GPUs.
    pub stride: u64,
}

/// A group's distribution over the levels.
#[derive(Clone, Debug, PartialEq)]
pub struct Span<'a> {
    cluster: &'a Cluster,
    /// For each level l: number of members that a member reaches without leaving level l, including itself. Ascending;
    /// the last is the group size.
    reach: Vec<f64>,
    /// Achieved fraction of the link bandwidth.
    share: f64,
    /// Seconds of overhead per operation, in addition to its latencies.
    overhead: f64,
}

/// A level that a group crosses.
struct Crossed<'a> {
    level: &'a Level,
    /// Members reached inside this level.
    below: f64,
    /// Members reached when including this level.
    reach: f64,
    is_innermost: bool,
}

impl Crossed<'_> {
    /// Rounds of a reduce-scatter or an allgather over a level. Inside the innermost domain, members read from all
    /// others at once. Between domains, each round at most doubles the number of members whose data has arrived, as in
    /// NCCL's trees.
    fn rounds(&self) -> f64 {
        if self.is_innermost { 1.0 } else { (self.reach / self.below).log2().ceil() }
    }
}

impl Cluster {
    /// Computes a group's distribution over the levels.
    pub fn span(&self, group: Group) -> Span<'_> {
        let mut domain = 1;
        let last = self.levels.len() - 1;
        let reach = self.levels.iter().enumerate().map(|(at, level)| {
            domain *= level.count;
            if at == last { group.size } else { (domain / group.stride.max(1)).clamp(1, group.size.max(1)) }
        });
        Span { cluster: self, reach: reach.map(|members| members as f64).collect(), share: 1.0, overhead: 0.0 }
    }
}

impl<'a> Span<'a> {
    /// Sets the achieved fraction of the bandwidth, and the overhead in seconds per operation. Measured times ignore
    /// both.
    pub fn tuned(self, share: f64, overhead: f64) -> Self {
        Self { share, overhead, ..self }
    }

    /// Number of members in the group.
    pub fn size(&self) -> f64 {
        self.reach.last().copied().unwrap_or(1.0)
    }

    fn crossed(&self) -> impl Iterator<Item = Crossed<'a>> {
        let below = std::iter::once(1.0).chain(self.reach.iter().copied());
        let levels = self.cluster.levels.iter().enumerate().zip(below).zip(&self.reach);
        let crossed =
            levels.map(|(((at, level), below), reach)| Crossed { level, below, reach: *reach, is_innermost: at == 0 });
        crossed.filter(|at| at.reach > at.below)
    }

    /// Seconds to send `bytes` over one level's links.
    fn sent(&self, level: &Level, bytes: f64) -> f64 {
        level.latency + bytes / (level.bytes_per_second * self.share)
    }

    /// Returns an operator's table if it was measured with the same number of ranks, and the group crosses only the
    /// table's level.
    fn table(&self, operator: Operator) -> Option<&'a Measured> {
        let mut crossed = self.crossed();
        let (Some(first), None) = (crossed.next(), crossed.next()) else { return None };
        let fits = |table: &&Measured| {
            table.level == first.level.name && table.operator == operator && table.ranks as f64 == self.size()
        };
        self.cluster.measured.collectives.iter().find(fits)
    }

    /// Whether measured times are available for an operator.
    pub fn is_measured(&self, operator: Operator) -> bool {
        self.table(operator).is_some()
    }

    /// Returns an operation's seconds: measured if a table covers the group, otherwise modelled.
    fn operation(&self, operator: Operator, bytes: f64, modelled: impl Fn() -> f64) -> f64 {
        if self.size() <= 1.0 {
            return 0.0;
        }
        self.table(operator).map_or_else(|| modelled() + self.overhead, |table| table.seconds(bytes))
    }

    /// Seconds of a reduce-scatter or an allgather of `bytes`, the size of the whole tensor (MixServe, equation 1, with
    /// a bandwidth and a latency per level): every level moves `x (d - 1) / (d B)` and adds its latency per round,
    /// where x is the bytes that remain after the inner levels.
    pub fn scatter(&self, bytes: f64) -> f64 {
        self.operation(Operator::Scatter, bytes, || self.modelled_scatter(bytes))
    }

    fn modelled_scatter(&self, bytes: f64) -> f64 {
        let of = |at: Crossed<'_>| {
            let factor = at.reach / at.below;
            let further = (at.rounds() - 1.0) * at.level.latency;
            further + self.sent(at.level, bytes / at.below * (factor - 1.0) / factor)
        };
        self.crossed().map(of).sum()
    }

    /// Seconds of an all-reduce of `bytes`: a reduce-scatter and an allgather (MixServe's equation 2 divides twice).
    pub fn all_reduce(&self, bytes: f64) -> f64 {
        self.operation(Operator::AllReduce, bytes, || 2.0 * self.modelled_scatter(bytes))
    }

    /// Seconds of an all-to-all in which each member has `bytes` in total for all members, including itself (MixServe,
    /// equation 3): data for members that are only reachable through level l crosses its links, one level after
    /// another.
    pub fn all_to_all(&self, bytes: f64) -> f64 {
        let of = |at: Crossed<'_>| self.sent(at.level, bytes * (at.reach - at.below) / self.size());
        self.operation(Operator::AllToAll, bytes, || self.crossed().map(of).sum())
    }

    /// Seconds from one member to the next over the outermost level that the group crosses.
    pub fn point_to_point(&self, bytes: f64) -> f64 {
        let outermost = || self.crossed().last().map_or(0.0, |at| self.sent(at.level, bytes));
        self.operation(Operator::PointToPoint, bytes, outermost)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tests::fixtures::h200;

    /// `nodes` of 8 GPUs, 450 GB/s inside, 50 GB/s between, no latency.
    fn without_latency(nodes: u64) -> Cluster {
        let mut cluster = h200(nodes);
        cluster.levels.iter_mut().for_each(|level| level.latency = 0.0);
        cluster
    }

    /// x = 229,376 B, d = 8: 2 x (d - 1) / d.
    #[test]
    fn an_all_reduce_moves_the_golden_bytes() {
        let cluster = without_latency(1);
        let span = cluster.span(Group { size: 8, stride: 1 });
        assert!((span.all_reduce(229_376.0) * 450e9 - 401_408.0).abs() < 1e-6);
        assert!((2.0 * span.scatter(229_376.0) * 450e9 - 401_408.0).abs() < 1e-6);
    }

    /// MixServe's equations 12 and 13: b 16, s 1, h 7168, k 8, 2 x 8 GPUs; microseconds. As printed, EP sends every
    /// token's copies from each GPU of a node; engines send a slice from each, which leaves little of the gain.
    #[test]
    fn golden_hybrid_times() {
        let cluster = without_latency(2);
        let span = |size, stride| cluster.span(Group { size, stride });
        let (inside, between, all) = (span(8, 1), span(2, 8), span(16, 1));
        let whole = 16.0 * 7168.0 * 2.0;
        let (routed, slice) = (8.0 * whole, 8.0 * whole / 8.0);
        let (reduce, gather, exchange) = (inside.all_reduce(whole), inside.scatter(routed), between.all_to_all(slice));
        for (case, seconds, microseconds) in [
            ("EP, printed", reduce + 2.0 * between.all_to_all(routed), 37.59),
            ("hybrid, printed", reduce + gather + 2.0 * exchange, 9.05),
            ("EP, sliced", reduce + 2.0 * all.all_to_all(slice), 5.93),
            ("hybrid, overlapped", reduce + gather.max(2.0 * exchange), 5.48),
        ] {
            assert!((seconds * 1e6 - microseconds).abs() < 0.005, "{case}: {seconds}");
        }
    }

    /// 4 nodes of 8 GPUs: one latency inside a node, log2 of the nodes between them, however the group is spread.
    #[test]
    fn latency_between_nodes_counts_once_a_round() {
        let mut cluster = h200(4);
        (cluster.levels[0].latency, cluster.levels[1].latency) = (1.0, 10.0);
        for (size, stride, seconds) in [(8, 1, 1.0), (16, 1, 11.0), (32, 1, 21.0), (2, 8, 10.0), (4, 8, 20.0)] {
            let span = cluster.span(Group { size, stride });
            assert_eq!((span.scatter(0.0), span.all_reduce(0.0)), (seconds, 2.0 * seconds), "{size} by {stride}");
        }
        // With three nodes the second round is not full, and takes as long.
        assert_eq!(cluster.span(Group { size: 3, stride: 8 }).scatter(0.0), 20.0);
    }

    #[test]
    fn groups_cross_the_levels_that_their_strides_say() {
        let cluster = h200(4);
        let reach = |size, stride| cluster.span(Group { size, stride }).reach;
        assert_eq!(reach(8, 1), [8.0, 8.0]);
        assert_eq!(reach(4, 8), [1.0, 4.0]);
        assert_eq!(reach(8, 4), [2.0, 8.0]);
        assert_eq!(reach(32, 1), [8.0, 32.0]);
        assert_eq!(reach(1, 1), [1.0, 1.0]);
        let alone = cluster.span(Group { size: 1, stride: 1 });
        assert_eq!((alone.scatter(1e6), alone.all_to_all(1e6), alone.point_to_point(1e6)), (0.0, 0.0, 0.0));
    }

    proptest! {
        /// Over equal links without latency the hierarchy gains nothing: every collective costs as much as on one flat
        /// level.
        #[test]
        fn levels_of_equal_links_are_one_level(size in 0u32..6, stride in 0u32..6, bytes in 1.0f64..1e9) {
            prop_assume!(size + stride <= 5);
            let group = Group { size: 1 << size, stride: 1 << stride };
            let mut cluster = h200(4);
            for level in &mut cluster.levels {
                (level.latency, level.bytes_per_second) = (0.0, 1e9);
            }
            let span = cluster.span(group);
            let flat = bytes * (span.size() - 1.0) / span.size() / 1e9;
            prop_assert!((span.scatter(bytes) - flat).abs() <= 1e-12 * flat.max(1e-9));
            prop_assert!((span.all_to_all(bytes) - flat).abs() <= 1e-12 * flat.max(1e-9));
        }
    }
}
