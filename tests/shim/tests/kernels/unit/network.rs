//! A simulated NCCL whose ranks are threads: the last one to end a group moves everyone's bytes.

use std::sync::Arc;

use semmoe_kernels_cuda::GpuError;
use semmoe_kernels_cuda::hosts::{Span, Transfer, Wire};
use semmoe_kernels_shim::Group;

type Calls = Vec<Transfer>;

pub(super) struct Nccl {
    rank: usize,
    ranks: usize,
    group: Arc<Group<Calls>>,
    /// The group at which calls start to fail.
    refused: Option<usize>,
}

pub(super) fn group(ranks: usize) -> Arc<Group<Calls>> {
    let run = |groups: Vec<Option<Calls>>, _| {
        let groups: Vec<Calls> = groups.into_iter().map(Option::unwrap_or_default).collect();
        (0..groups.len()).try_for_each(|rank| move_all(rank, &groups))
    };
    Arc::new(Group::new(ranks, run))
}

impl Nccl {
    pub(super) fn new(rank: usize, ranks: usize, group: Arc<Group<Calls>>, refused: Option<usize>) -> Self {
        Self { rank, ranks, group, refused }
    }
}

impl Wire for Nccl {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    unsafe fn group(&mut self, calls: &[Transfer]) -> Result<(), GpuError> {
        if let Some(left) = &mut self.refused {
            *left = left.wrapping_sub(1);
            if *left == 0 {
                return Err("out of luck".into());
            }
        }
        Ok(self.group.arrive(self.rank, calls.to_vec())?)
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        self.group.leave(self.rank);
    }
}

fn copy(from: u64, to: Span) {
    // SAFETY: the calls guarantee that both are the test's memory of this length; they may overlap.
    unsafe { std::ptr::copy(from as *const u8, to.address as *mut u8, to.count as usize * to.dtype.bytes()) };
}

/// Everything that one rank receives, at most once from each peer in a group.
fn move_all(rank: usize, groups: &[Calls]) -> Result<(), String> {
    for (peer, calls) in groups.iter().enumerate() {
        let sent = calls.iter().find_map(|call| match call {
            Transfer::Send { from, peer } if *peer == rank => Some(*from),
            _ => None,
        });
        let wanted = groups[rank].iter().find_map(|call| match call {
            Transfer::Receive { to, peer: source } if *source == peer => Some(*to),
            _ => None,
        });
        match (sent, wanted) {
            (None, None) => {}
            (Some(from), Some(to)) if (from.count, from.dtype) == (to.count, to.dtype) => copy(from.address, to),
            other => return Err(format!("rank {peer} sends and rank {rank} receives {other:?}")),
        }
    }
    let broadcasts = |calls: &Calls| -> Calls {
        calls.iter().copied().filter(|call| matches!(call, Transfer::Broadcast { .. })).collect()
    };
    for (index, call) in broadcasts(&groups[rank]).into_iter().enumerate() {
        let Transfer::Broadcast { to, root, .. } = call else { continue };
        match broadcasts(&groups[root]).get(index) {
            Some(Transfer::Broadcast { from, to: theirs, root: same }) if (*same, theirs.count) == (root, to.count) => {
                copy(*from, to);
            }
            other => return Err(format!("rank {root} does not broadcast: {other:?}")),
        }
    }
    Ok(())
}
