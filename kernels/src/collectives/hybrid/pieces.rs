//! Divides the rows that cross nodes into pieces.

use std::ops::Range;

use crate::nodes::NodeGrid;

/// The rows that cross nodes, in pieces: first those to the next node, in C chunks, then those to the node after that,
/// and so on. This makes N - 1 rounds of pairs, as in Algorithms 1 and 2 of MixServe.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pieces {
    pub(super) grid: NodeGrid,
    /// This rank's node.
    pub(super) node: usize,
    /// C
    pub(super) chunks: usize,
}

impl Pieces {
    /// Returns the number of pieces that cross nodes.
    pub(super) fn crossing(self) -> usize {
        (self.grid.nodes() - 1) * self.chunks
    }

    /// Returns the number of pieces in which rows for this node are gathered, concurrently with those that cross.
    pub(super) fn own(self) -> usize {
        self.crossing().max(1)
    }

    fn distance(self, piece: usize) -> usize {
        piece / self.chunks + 1
    }

    /// Returns the node that receives this node's piece.
    pub(super) fn to(self, piece: usize) -> usize {
        (self.node + self.distance(piece)) % self.grid.nodes()
    }

    /// Returns the node whose piece this node receives.
    pub(super) fn from(self, piece: usize) -> usize {
        (self.node + self.grid.nodes() - self.distance(piece)) % self.grid.nodes()
    }

    /// Returns the index of the piece among a node's chunks.
    pub(super) fn chunk(self, piece: usize) -> usize {
        piece % self.chunks
    }
}

/// Returns one of `parts` even parts of some rows.
pub(super) fn part(rows: usize, index: usize, parts: usize) -> Range<usize> {
    rows * index / parts..rows * (index + 1) / parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_node_sends_another_receives_in_the_same_piece() {
        for (nodes, chunks) in [(1, 3), (2, 1), (3, 2), (5, 4)] {
            let of = |node| Pieces { grid: NodeGrid::new(nodes, nodes).unwrap(), node, chunks };
            for node in 0..nodes {
                let mut seen = vec![0; nodes];
                for piece in 0..of(node).crossing() {
                    assert_eq!(of(of(node).to(piece)).from(piece), node);
                    // Chunks of one node arrive in order.
                    assert_eq!(of(node).chunk(piece), seen[of(node).to(piece)]);
                    seen[of(node).to(piece)] += 1;
                }
                let expected: Vec<usize> = (0..nodes).map(|to| if to == node { 0 } else { chunks }).collect();
                assert_eq!(seen, expected);
            }
        }
    }

    #[test]
    fn parts_are_even_and_cover_all_rows() {
        for (rows, parts) in [(0, 3), (2, 5), (10, 3), (7, 1)] {
            let ends: Vec<Range<usize>> = (0..parts).map(|index| part(rows, index, parts)).collect();
            assert!(ends.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert_eq!((ends[0].start, ends[parts - 1].end), (0, rows));
            let filled = ends.iter().filter(|range| !range.is_empty()).count();
            assert_eq!(filled, rows.min(parts), "as many messages with rows as are counted");
            assert!(ends.iter().all(|range| range.len() <= rows.div_ceil(parts)));
        }
    }
}
