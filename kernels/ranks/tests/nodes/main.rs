//! Units whose ranks are divided into nodes: groups of ranks, and hybrid TP-EP over both levels.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod groups;
mod hybrid;

use semmoe_kernels::NodeGrid;
use semmoe_kernels::collectives::UnitLink;
use semmoe_ranks::LocalTransport;

/// Number of nodes, and of ranks per node.
pub(crate) const GRIDS: [[usize; 2]; 9] = [[1, 1], [1, 2], [2, 1], [2, 2], [3, 2], [2, 3], [4, 1], [4, 2], [2, 4]];

pub(crate) type Link = UnitLink<LocalTransport>;

pub(crate) fn grid(shape: [usize; 2]) -> NodeGrid {
    NodeGrid::new(shape[0] * shape[1], shape[0]).unwrap()
}

/// Runs every rank in its own thread, and returns their results.
pub(crate) fn on_ranks<I: Send, O: Send>(ranks: Vec<I>, work: impl Fn(usize, I) -> O + Sync) -> Vec<O> {
    std::thread::scope(|scope| {
        let work = &work;
        let start = |(rank, it)| scope.spawn(move || work(rank, it));
        let threads: Vec<_> = ranks.into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The joined links of all ranks.
pub(crate) fn links(grid: NodeGrid) -> Vec<Link> {
    on_ranks(LocalTransport::mesh(grid.ranks()), |_, link| UnitLink::join(link, grid.nodes()).unwrap())
}
