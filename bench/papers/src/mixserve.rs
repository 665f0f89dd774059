//! A layer's exchange on two levels of links between ranks with attention dp: expert parallelism over all ranks, expert
//! domains, and experts assigned to nodes, with both levels one after the other or overlapped.
//!
//! Routing is uniform: each token takes k of E experts. Computation and latency are left out.

use semmoe_planner::PlanError;

use crate::positive;

/// Ranks on nodes, and each rank's traffic in a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TwoLevels {
    /// Tokens of a rank.
    pub tokens: f64,
    /// Bytes of a row.
    pub row_bytes: f64,
    /// E; a multiple of the ranks.
    pub experts: u64,
    /// k
    pub top_k: u64,
    /// N
    pub nodes: u64,
    /// P: ranks of a node.
    pub width: u64,
    /// Bytes per second of a rank to others of its node, in each direction.
    pub inside: f64,
    /// Bytes per second of a rank to other nodes, in each direction, over separate links.
    pub between: f64,
}

impl TwoLevels {
    /// Checks all values.
    ///
    /// # Errors
    /// [`PlanError::Value`] for the first invalid one.
    pub fn check(&self) -> Result<(), PlanError> {
        for (what, value) in [
            ("the tokens of a rank", self.tokens),
            ("the bytes of a row", self.row_bytes),
            ("the nodes", self.nodes as f64),
            ("the ranks of a node", self.width as f64),
            ("the experts of a rank", (self.experts / self.ranks().max(1)) as f64),
            ("top-k", self.top_k as f64),
            ("the experts beside the top-k", self.experts as f64 - self.top_k as f64),
            ("the bandwidth inside nodes in bytes/s", self.inside),
            ("the bandwidth between nodes in bytes/s", self.between),
        ] {
            positive(what, value)?;
        }
        Ok(())
    }

    fn ranks(&self) -> u64 {
        self.nodes * self.width
    }

    /// Bytes of a rank's rows for a subset of the experts: a token is sent there once, however many of its experts are
    /// there.
    fn rows_for(&self, experts: u64) -> f64 {
        let none = (0..self.top_k).map(|taken| {
            let left = (self.experts - taken) as f64;
            (left - experts as f64).max(0.0) / left
        });
        self.tokens * self.row_bytes * (1.0 - none.product::<f64>())
    }

    /// Seconds of dispatch and combine, as long as the slower level takes.
    fn at_once(&self, inside: f64, between: f64) -> f64 {
        2.0 * (inside / self.inside).max(between / self.between)
    }

    /// Seconds of dispatch and combine with expert domains of `size` neighbours, where 1 is plain expert parallelism: a
    /// token is sent once to each other domain, to the rank at its own rank's position there.
    ///
    /// # Errors
    /// A size that divides neither the ranks of a node nor, in whole nodes, all ranks.
    pub fn domains(&self, size: u64) -> Result<f64, PlanError> {
        let (width, ranks) = (self.width, self.ranks());
        if size == 0 || !ranks.is_multiple_of(size) || !(width.is_multiple_of(size) || size.is_multiple_of(width)) {
            let expected = "a divisor of a node's ranks, or whole nodes that divide all";
            return Err(PlanError::Value { what: "the size of an expert domain", found: size as f64, expected });
        }
        let rows = self.rows_for(self.experts * size / ranks);
        let (near, all) = ((width / size).max(1), ranks / size);
        Ok(self.at_once((near - 1) as f64 * rows, (all - near) as f64 * rows))
    }

    /// Seconds of dispatch and combine if experts are assigned to nodes and the two levels alternate.
    pub fn unfused(&self) -> f64 {
        let rows = self.rows_for(self.experts / self.nodes);
        let [inside, between] = self.hybrid_bytes(rows);
        2.0 * (inside / self.inside + between / self.between)
    }

    /// Seconds of dispatch and combine if both levels overlap, in `chunks` (AG-Dispatch and RS-Combine, Algorithms 1
    /// and 2): while one chunk crosses nodes, the previous one is gathered with a part of the rows that stay.
    pub fn fused(&self, chunks: u64) -> f64 {
        let rows = self.rows_for(self.experts / self.nodes);
        let crossing = (self.nodes - 1) * chunks.max(1);
        let (piece, own) = (rows / chunks.max(1) as f64, rows / crossing.max(1) as f64);
        let step = |step: u64| {
            let stays = if step < crossing.max(1) { own } else { 0.0 };
            let crossed = if step > 0 { piece } else { 0.0 };
            let crosses = if step < crossing { piece } else { 0.0 };
            self.at_once((self.width - 1) as f64 * (stays + crossed), crosses)
        };
        (0..=crossing).map(step).sum()
    }

    /// All rows of a node go to its other ranks; before that each crosses nodes once.
    fn hybrid_bytes(&self, rows: f64) -> [f64; 2] {
        [(self.width - 1) as f64 * self.nodes as f64 * rows, (self.nodes - 1) as f64 * rows]
    }
}

/// Tokens per second of one request, from arrival to end (equation 11): `(input + output) / (wait + prefill + output x
/// itl)`, lengths in tokens and times in seconds. The paper calls it the throughput of a deployment, which it is not.
pub fn request_rate(tokens: [f64; 2], wait: f64, prefill: f64, itl: f64) -> f64 {
    let [input, output] = tokens;
    (input + output) / (wait + prefill + output * itl)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn unit(ratio: f64) -> TwoLevels {
        TwoLevels {
            tokens: 256.0,
            row_bytes: 1024.0,
            experts: 32,
            top_k: 4,
            nodes: 2,
            width: 2,
            inside: ratio * 1e6,
            between: 1e6,
        }
    }

    #[test]
    fn golden_request_rate() {
        assert!((request_rate([512.0, 128.0], 0.4, 0.5, 0.02) - 184.97).abs() < 0.005);
    }

    /// 2 x 2 ranks, 4 of 32 experts: a token needs another rank with probability 1 - C(24,4)/C(32,4), and another node
    /// with 1 - C(16,4)/C(32,4).
    #[test]
    fn golden_times() {
        let rows = 256.0 * 1024.0;
        let (rank, node) = (1.0 - 10_626.0 / 35_960.0, 1.0 - 1_820.0 / 35_960.0);
        for (ratio, flat, hybrid) in [(1.0, 2.0 * rank, 3.0), (8.0, 2.0 * rank, 1.25), (0.25, 4.0 * rank, 9.0)] {
            let near = |found: f64, rows_sent: f64| (found - 2.0 * rows * rows_sent / 1e6).abs() < 1e-9;
            assert!(near(unit(ratio).domains(1).unwrap(), flat), "{ratio}");
            assert!(near(unit(ratio).unfused(), hybrid * node), "{ratio}");
            assert!(near(unit(ratio).domains(2).unwrap(), node), "{ratio}");
            assert_eq!(unit(ratio).domains(4).unwrap(), 0.0);
        }
        // Balanced, in 4 chunks: the first and the last of 5 steps use only one level.
        assert!((unit(2.0).fused(4) / unit(2.0).unfused() - 1.125 / 2.0).abs() < 1e-9);
    }

    #[test]
    fn what_cannot_be_is_an_error() {
        assert!(unit(1.0).check().is_ok());
        for wrong in [
            TwoLevels { width: 0, ..unit(1.0) },
            TwoLevels { top_k: 32, ..unit(1.0) },
            TwoLevels { experts: 3, ..unit(1.0) },
            TwoLevels { inside: f64::NAN, ..unit(1.0) },
        ] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
        for size in [0, 3, 8] {
            assert!(unit(1.0).domains(size).is_err());
        }
    }

    proptest! {
        #[test]
        fn fused_is_between_the_slower_level_and_both(
            nodes in 1u64..5, width in 1u64..5, chunks in 1u64..9, ratio in 0.1f64..20.0, top_k in 1u64..8,
        ) {
            let unit = TwoLevels { nodes, width, top_k, experts: 8 * nodes * width, ..unit(ratio) };
            let rows = unit.rows_for(unit.experts / nodes);
            let [inside, between] = unit.hybrid_bytes(rows);
            let slower = unit.at_once(inside, between);
            let fused = unit.fused(chunks);
            prop_assert!(fused >= slower * (1.0 - 1e-9) && fused <= unit.unfused() * (1.0 + 1e-9));
            prop_assert!(unit.domains(nodes * width).unwrap() == 0.0);
        }
    }
}
