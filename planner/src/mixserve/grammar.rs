//! The grammar of strategies (section III-B1), counted and listed.
//!
//! ```text
//! strategy -> Decoder | Decoder [PP = degree]        Decoder -> Attention, MoE
//! block    -> intra-node + inter-node | parallel     parallel -> TP | EP (DP) = degree      degree -> 2^k
//! ```
//!
//! Attention takes TP and DP, experts TP and EP. Three counts differ by what is called the same:
//!
//! | count | a block of 2^m GPUs | strategies for 8, 16, 32, 64 GPUs |
//! |---|---|---|
//! | [`flat`] | its degrees (TP, other) | 30, 55, 91, 140 |
//! | [`placements`] | its degrees, and which of the two is inside: 2m, or 1 for one GPU | 57, 121, 221, 365 |
//! | [`derivations`] | its parse tree, in nodes of 8 GPUs | 980, 1304, 1628, 1952 |

use crate::layout::Layout;

/// Strategies for a number of GPUs, by [`flat`] degrees.
#[derive(Clone, Debug, Default)]
pub struct Strategies(Vec<Layout>);

impl Strategies {
    /// All layouts of `gpus` GPUs, of which only powers of two have any. Fewest stages first, then most tensor
    /// parallelism.
    #[must_use]
    pub fn of(gpus: u64) -> Self {
        let mut layouts = Vec::new();
        if !gpus.is_power_of_two() {
            return Self(layouts);
        }
        for pipeline in degrees(gpus) {
            let stage = gpus / pipeline;
            for attention_dp in degrees(stage) {
                for expert_ep in degrees(stage) {
                    layouts.push(Layout {
                        pipeline,
                        attention_tp: stage / attention_dp,
                        attention_dp,
                        expert_tp: stage / expert_ep,
                        expert_ep,
                    });
                }
            }
        }
        Self(layouts)
    }

    /// The layouts.
    pub fn iter(&self) -> impl Iterator<Item = &Layout> {
        self.0.iter()
    }
}

/// Powers of two up to and with `most`.
fn degrees(most: u64) -> impl Iterator<Item = u64> {
    (0..=most.ilog2()).map(|exponent| 1 << exponent)
}

/// Sum over the pipeline degrees of the square of the blocks of a stage.
fn count(gpus: u64, blocks: impl Fn(u64) -> u64) -> u64 {
    if !gpus.is_power_of_two() {
        return 0;
    }
    degrees(gpus).map(|pipeline| blocks(gpus / pipeline).pow(2)).sum()
}

/// Strategies by degrees alone: PP x (TP, DP) x (TP, EP).
#[must_use]
pub fn flat(gpus: u64) -> u64 {
    count(gpus, |stage| u64::from(stage.ilog2()) + 1)
}

/// Strategies by degrees and order: TP inside DP and DP inside TP are two if both are above 1.
#[must_use]
pub fn placements(gpus: u64) -> u64 {
    count(gpus, |stage| (2 * u64::from(stage.ilog2())).max(1))
}

/// Parse trees of the full grammar for nodes of `node_gpus`: a block is one kind of the whole degree, or a kind and a
/// degree inside nodes, at most `node_gpus`, and a kind for the rest. Trees that mean the same (a kind of degree 1)
/// are counted apart, as are a strategy without PP and one with PP = 1.
#[must_use]
pub fn derivations(gpus: u64, node_gpus: u64) -> u64 {
    let block = |stage: u64| 2 + 4 * degrees(stage.min(node_gpus.max(1))).count() as u64;
    let without = if gpus.is_power_of_two() { block(gpus).pow(2) } else { 0 };
    without + count(gpus, block)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn golden_counts() {
        for (gpus, strategies) in [(8, 30), (16, 55), (32, 91), (64, 140)] {
            assert_eq!(flat(gpus), strategies);
            let listed: BTreeSet<Layout> = Strategies::of(gpus).iter().copied().collect();
            assert_eq!(listed.len() as u64, strategies);
            assert!(
                listed
                    .iter()
                    .all(|layout| layout.gpus() == gpus && layout.stage() == layout.expert_tp * layout.expert_ep)
            );
        }
        assert_eq!((flat(12), Strategies::of(12).iter().count(), flat(1)), (0, 0, 1));
    }

    /// Written out: every parse tree, and the set of what they mean.
    #[test]
    fn counts_are_those_of_the_trees_written_out() {
        for (gpus, node) in [(1, 1), (4, 2), (8, 8), (16, 8), (64, 8)] {
            let mut trees = 0;
            let mut meanings = BTreeSet::new();
            let blocks = |stage: u64| {
                let mut blocks: Vec<Vec<(bool, u64)>> = [false, true].map(|tensor| vec![(tensor, stage)]).into();
                for inner in degrees(stage.min(node)) {
                    for kinds in [[false, false], [false, true], [true, false], [true, true]] {
                        blocks.push(vec![(kinds[0], inner), (kinds[1], stage / inner)]);
                    }
                }
                blocks
            };
            let meaning = |block: &[(bool, u64)]| {
                let mut parts: Vec<(bool, u64)> = block.iter().copied().filter(|part| part.1 > 1).collect();
                if parts.len() == 2 && parts[0].0 == parts[1].0 {
                    parts = vec![(parts[0].0, parts[0].1 * parts[1].1)];
                }
                parts
            };
            for pipeline in degrees(gpus) {
                let blocks = blocks(gpus / pipeline);
                for attention in &blocks {
                    for experts in &blocks {
                        trees += if pipeline == 1 { 2 } else { 1 };
                        meanings.insert((pipeline, meaning(attention), meaning(experts)));
                    }
                }
            }
            assert_eq!(derivations(gpus, node), trees, "{gpus} GPUs in nodes of {node}");
            // A border inside the node hides none; where nodes are smaller than stages, some inner degrees have no
            // tree.
            if node >= gpus {
                assert_eq!(placements(gpus), meanings.len() as u64, "{gpus} GPUs");
            }
        }
        assert_eq!([8, 16, 32, 64].map(placements), [57, 121, 221, 365]);
        assert_eq!([8, 16, 32, 64].map(|gpus| derivations(gpus, 8)), [980, 1304, 1628, 1952]);
    }
}
