//! How a unit's ranks are divided among nodes.

use crate::error::KernelError;

/// W = N x P ranks on N nodes of P ranks each: rank r is on node r / P and has local index r mod P.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeGrid {
    pub(crate) nodes: usize,
    pub(crate) width: usize,
}

impl NodeGrid {
    /// Creates a grid of `ranks` ranks on `nodes` nodes.
    ///
    /// # Errors
    /// If there are no ranks or no nodes, or the ranks do not split evenly over the nodes.
    pub fn new(ranks: usize, nodes: usize) -> Result<Self, KernelError> {
        match ranks.checked_div(nodes) {
            Some(width) if width > 0 && width * nodes == ranks => Ok(Self { nodes, width }),
            _ => Err(KernelError::Nodes { nodes, ranks }),
        }
    }

    /// N
    pub fn nodes(self) -> usize {
        self.nodes
    }

    /// P: ranks per node.
    pub fn width(self) -> usize {
        self.width
    }

    /// W
    pub fn ranks(self) -> usize {
        self.nodes * self.width
    }

    /// Returns a rank's node.
    pub fn node(self, rank: usize) -> usize {
        rank / self.width
    }

    /// Returns a rank's index on its node.
    pub fn local(self, rank: usize) -> usize {
        rank % self.width
    }

    /// Returns the rank with a local index on a node.
    pub fn rank(self, node: usize, local: usize) -> usize {
        node * self.width + local
    }

    /// Returns the ranks of a node, ascending: the n-th has local index n.
    pub fn inside(self, node: usize) -> impl Iterator<Item = usize> {
        (0..self.width).map(move |local| self.rank(node, local))
    }

    /// Returns the ranks with a local index, ascending: the n-th is on node n.
    pub fn across(self, local: usize) -> impl Iterator<Item = usize> {
        (0..self.nodes).map(move |node| self.rank(node, local))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_is_in_one_group_inside_and_one_across() {
        let grid = NodeGrid::new(6, 2).unwrap();
        assert_eq!((grid.nodes(), grid.width(), grid.ranks()), (2, 3, 6));
        assert_eq!(grid.inside(1).collect::<Vec<_>>(), [3, 4, 5]);
        assert_eq!(grid.across(2).collect::<Vec<_>>(), [2, 5]);
        for rank in 0..6 {
            assert_eq!(grid.rank(grid.node(rank), grid.local(rank)), rank);
            assert_eq!(grid.inside(grid.node(rank)).nth(grid.local(rank)), Some(rank));
            assert_eq!(grid.across(grid.local(rank)).nth(grid.node(rank)), Some(rank));
        }
    }

    #[test]
    fn nodes_that_do_not_divide_the_ranks_are_refused() {
        for (ranks, nodes) in [(6, 4), (0, 1), (4, 0), (2, 4), (0, 0)] {
            let error = NodeGrid::new(ranks, nodes).unwrap_err();
            assert_eq!(error.to_string(), format!("{ranks} ranks cannot be split evenly over {nodes} nodes"));
        }
    }
}
