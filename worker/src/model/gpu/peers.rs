//! Makes other ranks' memory accessible: in this process by its address, in other processes on this host by handles.

use semmoe_kernels_cuda::Buffer;
use semmoe_kernels_cuda::unit::{LocalRank, UnitRank};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::SharedAccelerator;
use crate::ep::{ExpertParallel, UnitError};
use crate::model::switch::allgather_messages;

/// The facts about a rank's GPU that the other ranks check.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Introduction {
    process: u32,
    /// Identifies the GPU within this host.
    gpu: String,
    /// Number of blocks that a collective launches.
    blocks: u32,
}

/// Addresses of a rank's memory in its own process.
#[derive(Serialize, Deserialize)]
struct Located {
    process: u32,
    memory: Vec<Region>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
struct Region {
    address: u64,
    bytes: u64,
}

/// Joins the unit: every rank maps the memory of other ranks that its kernels access.
///
/// # Errors
/// If a rank was lost, the GPUs are of different kinds, or memory cannot be mapped.
pub(crate) fn meet(local: LocalRank, ep: &mut ExpertParallel) -> Result<UnitRank, UnitError> {
    let rank = ep.rank().index();
    let (process, blocks) = (std::process::id(), local.runner.grid().blocks);
    check(rank, &exchange(&Introduction { process, gpu: local.gpu.clone(), blocks }, ep)?)?;
    let [signals, symmetric] = share(&local.runner, [local.signals, local.symmetric], ep)?;
    local.join(rank, &signals, symmetric).map_err(|error| UnitError::Operands { rank, detail: error.to_string() })
}

/// Checks that all ranks launch equally many blocks. Warns if processes share a GPU, which runs only one at a time.
fn check(me: usize, all: &[Introduction]) -> Result<(), UnitError> {
    let own = &all[me];
    for (rank, other) in all.iter().enumerate() {
        if other.blocks != own.blocks {
            let (found, expected) = (other.blocks, own.blocks);
            let detail = format!(
                "its GPU runs {expected} blocks of a collective, that of rank {rank} {found}: a unit needs GPUs of one kind"
            );
            return Err(UnitError::Operands { rank: me, detail });
        }
        if other.gpu == own.gpu && other.process != own.process && rank > me {
            tracing::warn!(
                "ranks {me} and {rank} are processes on one GPU ({}), which runs them in turns: each step is many times \
                 slower than with a GPU for each, or with all ranks in one process (--ranks-here)",
                own.gpu
            );
        }
    }
    Ok(())
}

/// Returns the addresses of all ranks' memory on this rank's GPU, `[P]` for each of its own regions. The regions must
/// have equal sizes on all ranks, and no kernel in flight may wait for a later one.
///
/// # Errors
/// If a rank was lost, sizes differ, or another process's memory cannot be mapped.
pub(super) fn share<const N: usize>(
    gpu: &SharedAccelerator,
    own: [Buffer; N],
    ep: &mut ExpertParallel,
) -> Result<[Vec<Buffer>; N], UnitError> {
    let (me, process) = (ep.rank().index(), std::process::id());
    let memory = own.iter().map(|&Buffer { address, bytes }| Region { address, bytes }).collect();
    let located = exchange(&Located { process, memory }, ep)?;
    let is_local = |rank: usize| located[rank].process == process;
    let handles = match (0..located.len()).all(is_local) {
        true => Vec::new(),
        false => exchange(&export(gpu, me, &own)?, ep)?,
    };
    let mut all = [const { Vec::new() }; N];
    for (rank, Located { memory, .. }) in located.iter().enumerate() {
        UnitError::check(rank, "a message about memory", memory.len(), N)?;
        for (at, (&Region { address, bytes }, own)) in memory.iter().zip(own).enumerate() {
            UnitError::check(rank, "memory that other ranks access", bytes as usize, own.bytes as usize)?;
            all[at].push(match is_local(rank) {
                true => Buffer { address, bytes },
                false => import(gpu, me, rank, handles[rank].get(at), bytes)?,
            });
        }
    }
    Ok(all)
}

/// Exchanges a message with all ranks; all of them send the same type.
fn exchange<M: Serialize + DeserializeOwned>(own: &M, ep: &mut ExpertParallel) -> Result<Vec<M>, UnitError> {
    let wrong = |rank: usize| move |error: serde_json::Error| UnitError::protocol(rank, error.to_string());
    let own = serde_json::to_vec(own).map_err(wrong(ep.rank().index()))?;
    let messages = allgather_messages(ep, own)?;
    messages.iter().enumerate().map(|(rank, message)| serde_json::from_slice(message).map_err(wrong(rank))).collect()
}

fn export(gpu: &SharedAccelerator, me: usize, own: &[Buffer]) -> Result<Vec<Vec<u8>>, UnitError> {
    let export = |&memory| gpu.export(memory);
    own.iter()
        .map(export)
        .collect::<Result<_, _>>()
        .map_err(|cause| UnitError::lost(me, format!("its GPU memory cannot be shared with other processes: {cause}")))
}

fn import(
    gpu: &SharedAccelerator,
    me: usize,
    rank: usize,
    handle: Option<&Vec<u8>>,
    bytes: u64,
) -> Result<Buffer, UnitError> {
    let handle = handle.ok_or_else(|| UnitError::protocol(rank, "it sent no handle for its memory"))?;
    gpu.import(handle, bytes)
        .map_err(|cause| UnitError::lost(me, format!("its GPU cannot access the memory of rank {rank}: {cause}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_of_a_unit_run_as_many_blocks() {
        let of = |process, gpu: &str, blocks| Introduction { process, gpu: gpu.to_owned(), blocks };
        check(0, &[of(1, "GPU-a", 8), of(2, "GPU-b", 8)]).unwrap();
        check(1, &[of(1, "GPU-a", 8), of(2, "GPU-a", 8)]).unwrap();
        let error = check(0, &[of(1, "GPU-a", 8), of(2, "GPU-b", 16)]).unwrap_err().to_string();
        assert!(error.contains("rank 1 16") && error.contains("8 blocks") && error.contains("one kind"), "{error}");
    }
}
