//! The grammar of strategies (section III-B1).
//!
//! ```text
//! strategy -> Decoder | Decoder [PP = degree]        Decoder -> Attention, MoE
//! block    -> intra-node + inter-node | parallel     parallel -> TP | EP (DP) = degree      degree -> 2^k
//! ```
//!
//! Attention uses TP and DP, experts use TP and EP. The number of strategies depends on which ones are considered
//! equal. The planner searches those of the first row:
//!
//! | a block of 2^m GPUs is identified by | strategies for 8, 16, 32, 64 GPUs |
//! |---|---|
//! | its degrees (TP, other) | 30, 55, 91, 140 |
//! | its degrees and which of the two is inside: 2m, or 1 for one GPU | 57, 121, 221, 365 |
//! | its parse tree, in nodes of 8 GPUs | 980, 1304, 1628, 1952 |

use crate::layout::Layout;

/// Returns all layouts of `gpus` GPUs by their degrees, PP x (TP, DP) x (TP, EP); empty unless `gpus` is a power of
/// two. Sorted by fewest stages, then by most tensor parallelism.
pub fn strategies(gpus: u64) -> Vec<Layout> {
    let mut layouts = Vec::new();
    if !gpus.is_power_of_two() {
        return layouts;
    }
    for pipeline in degrees(gpus) {
        let stage = gpus / pipeline;
        for attention_dp in degrees(stage) {
            for expert_ep in degrees(stage) {
                let (attention_tp, expert_tp) = (stage / attention_dp, stage / expert_ep);
                layouts.push(Layout { pipeline, attention_tp, attention_dp, expert_tp, expert_ep });
            }
        }
    }
    layouts
}

/// Returns the powers of two up to and including `most`.
fn degrees(most: u64) -> impl Iterator<Item = u64> {
    (0..=most.ilog2()).map(|exponent| 1 << exponent)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn golden_counts() {
        for (gpus, count) in [(8, 30), (16, 55), (32, 91), (64, 140)] {
            let listed: BTreeSet<Layout> = strategies(gpus).into_iter().collect();
            assert_eq!((listed.len(), strategies(gpus).len()), (count, count));
            assert!(
                listed
                    .iter()
                    .all(|layout| layout.gpus() == gpus && layout.stage() == layout.expert_tp * layout.expert_ep)
            );
        }
        assert_eq!((strategies(12).len(), strategies(1).len()), (0, 1));
    }

    /// Kinds (TP or the other one) and degrees, the inner one first.
    type Block = Vec<(bool, u64)>;

    /// A block is one kind over the whole degree, or a kind and a degree inside nodes and a kind for the rest.
    fn blocks(stage: u64, node: u64) -> Vec<Block> {
        let mut blocks: Vec<Block> = [false, true].map(|tensor| vec![(tensor, stage)]).into();
        for inner in degrees(stage.min(node)) {
            for kinds in [[false, false], [false, true], [true, false], [true, true]] {
                blocks.push(vec![(kinds[0], inner), (kinds[1], stage / inner)]);
            }
        }
        blocks
    }

    /// Equal for equivalent trees: a kind of degree 1 disappears, and adjacent equal kinds merge.
    fn meaning(block: &Block) -> Block {
        let parts: Block = block.iter().copied().filter(|part| part.1 > 1).collect();
        match parts[..] {
            [inner, outer] if inner.0 == outer.0 => vec![(inner.0, inner.1 * outer.1)],
            _ => parts,
        }
    }

    /// Enumerates every tree; a strategy without PP and one with PP = 1 are distinct. Meanings are counted only if no
    /// node boundary hides some: if nodes are smaller than stages, some inner degrees have no tree.
    #[test]
    fn golden_counts_of_the_trees_written_out() {
        for (gpus, node, trees, meanings) in [
            (1, 1, 72, Some(1)),
            (4, 2, 336, None),
            (8, 8, 980, Some(57)),
            (16, 8, 1304, None),
            (32, 8, 1628, None),
            (64, 8, 1952, None),
            (16, 16, 1624, Some(121)),
            (32, 32, 2492, Some(221)),
            (64, 64, 3616, Some(365)),
        ] {
            let mut found = 0;
            let (mut meant, mut layouts) = (BTreeSet::new(), BTreeSet::new());
            for pipeline in degrees(gpus) {
                let blocks = blocks(gpus / pipeline, node);
                for attention in &blocks {
                    for experts in &blocks {
                        found += if pipeline == 1 { 2 } else { 1 };
                        meant.insert((pipeline, meaning(attention), meaning(experts)));
                        let degree = |block: &Block, kind| -> u64 {
                            block.iter().filter(|part| part.0 == kind).map(|part| part.1).product()
                        };
                        layouts.insert(Layout {
                            pipeline,
                            attention_tp: degree(attention, true),
                            attention_dp: degree(attention, false),
                            expert_tp: degree(experts, true),
                            expert_ep: degree(experts, false),
                        });
                    }
                }
            }
            assert_eq!(found, trees, "{gpus} GPUs in nodes of {node}");
            if let Some(meanings) = meanings {
                assert_eq!(meant.len(), meanings, "{gpus} GPUs");
                assert!(layouts.into_iter().eq(strategies(gpus).into_iter().collect::<BTreeSet<_>>()), "{gpus} GPUs");
            }
        }
    }
}
