//! The ranks of one process on its GPU: one stream per rank, and memory that all ranks of the unit can access.
//!
//! Kernels of a collective wait for those of the other ranks. Meanwhile, the GPU must not need anything that itself
//! waits for these kernels: memory is allocated and kernels are loaded before the first collective, every rank has its
//! own stream, and waiting blocks leave room for a rank that is still computing.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUfunction_attribute, CUlimit};

use super::memory::{DeviceBuffer, synchronize};
use super::{Device, DeviceError, DeviceStream};
use crate::params::{COLLECTIVE_THREADS, MAX_BLOCKS, MAX_LOCAL, NORM_THREADS, SIGNAL_BYTES};
use crate::team::{Buffer, in_range};
use crate::unit::{LocalRank, Room};

/// Waiting blocks occupy at most 1 / `WAITING_SHARE` of each multiprocessor's slots.
const WAITING_SHARE: u32 = 4;

/// The kernels of a switch and of [`PeerMemory`](crate::unit::PeerMemory)'s calls, whose blocks wait for other ranks.
const WAITING: [&str; 5] = ["semmoe_srs_", "semmoe_sag_", "semmoe_dispatch_", "semmoe_combine_", "semmoe_reshard"];

/// A GPU that ranks of this process share.
pub struct DeviceUnit {
    device: Arc<Device>,
}

/// The ranks' memory that other ranks can access.
pub(super) struct UnitMemory {
    buffers: Vec<DeviceBuffer>,
    device: Arc<Device>,
}

impl Drop for UnitMemory {
    fn drop(&mut self) {
        // If binding fails, the context and its memory are gone.
        if self.device.bind().is_ok() {
            self.buffers.clear();
        }
    }
}

// SAFETY: any thread that binds a GPU may free its memory.
unsafe impl Send for UnitMemory {}
// SAFETY: this type itself never accesses the memory.
unsafe impl Sync for UnitMemory {}

impl DeviceUnit {
    /// Opens a GPU by its ordinal and loads all kernels; `kept` is the cache folder of [`Device::open_with`].
    ///
    /// # Errors
    /// See [`Device::open_with`].
    pub fn open(ordinal: usize, kept: Option<&Path>) -> Result<Self, DeviceError> {
        let device = Arc::new(Device::open_with(ordinal, kept)?);
        device.bind()?;
        device.reserve_local_memory()?;
        Ok(Self { device })
    }

    /// The GPU.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Returns the free bytes and the total bytes.
    ///
    /// # Errors
    /// If the driver refuses the call.
    pub fn memory(&self) -> Result<(u64, u64), DeviceError> {
        self.device.bind()?;
        let (free, all) = result::mem_get_info()?;
        Ok((free as u64, all as u64))
    }

    /// Creates the `here` ranks of this process in a unit of `room.ranks`, with the memory for their collectives. A
    /// kernel waits for another rank for at most `timeout`.
    ///
    /// # Errors
    /// If the GPU cannot run that many ranks at once, there is too little memory, or the driver refuses the call.
    pub fn ranks(&self, here: usize, room: &Room, timeout: Duration) -> Result<Vec<LocalRank>, DeviceError> {
        self.device.bind()?;
        let ranks = in_range("ranks on a GPU", here as u64, 1, MAX_LOCAL as u64)?;
        let blocks = self.device.waiting_blocks(ranks)?;
        let sizes = [SIGNAL_BYTES, room.symmetric_bytes(), room.own_bytes()];
        let mut buffers = Vec::new();
        let mut each = |bytes: u64| -> Result<Vec<Buffer>, DeviceError> {
            (0..ranks)
                .map(|_| {
                    let zeroed = DeviceBuffer::filled(bytes as usize, 0)?;
                    let buffer = zeroed.buffer();
                    buffers.push(zeroed);
                    Ok(buffer)
                })
                .collect()
        };
        let [signals, symmetric, own] = [each(sizes[0])?, each(sizes[1])?, each(sizes[2])?];
        synchronize()?;
        let gpu = self.device.uuid()?;
        let memory = Arc::new(UnitMemory { buffers, device: Arc::clone(&self.device) });
        let rank = |rank: usize| {
            let stream = DeviceStream::of(Arc::clone(&self.device), blocks)?.sharing(Arc::clone(&memory));
            let stream = if room.ranks == 1 { stream.alone() } else { stream };
            let report = stream.word();
            let (signals, symmetric, own) = (signals[rank], symmetric[rank], own[rank]);
            Ok(LocalRank { runner: Arc::new(stream), gpu: gpu.clone(), report, timeout, signals, symmetric, own })
        };
        (0..here).map(rank).collect()
    }
}

/// Returns the number of blocks per rank such that all ranks' blocks occupy at most `1 / WAITING_SHARE` of the slots.
fn blocks_of_a_rank(slots: u32, ranks: u32, threads: u32) -> u32 {
    // The fused norm has as many threads, in smaller blocks.
    slots / WAITING_SHARE / ranks / (COLLECTIVE_THREADS / threads)
}

impl Device {
    /// Returns the number of blocks per rank in a collective. All of them may be waiting while the last rank still
    /// computes their input, for which its kernels need the other slots.
    fn waiting_blocks(&self, ranks: u32) -> Result<u32, DeviceError> {
        let mut fewest = MAX_BLOCKS;
        for (&kernel, function) in &self.functions {
            if !WAITING.iter().any(|waiting| kernel.starts_with(waiting)) || kernel.contains("nvls") {
                continue;
            }
            let threads = if kernel.contains("norm") { NORM_THREADS } else { COLLECTIVE_THREADS };
            let resident = function.resident(threads)?;
            let blocks = blocks_of_a_rank(resident * self.processors, ranks, threads);
            if blocks == 0 {
                let most = resident * self.processors / WAITING_SHARE;
                return Err(DeviceError::TooManyBlocks { kernel, found: ranks * COLLECTIVE_THREADS / threads, most });
            }
            fewest = fewest.min(blocks);
        }
        Ok(fewest)
    }

    /// Allocates the kernels' local memory now: growing it later makes the driver wait for the whole GPU.
    fn reserve_local_memory(&self) -> Result<(), DeviceError> {
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES;
        let mut most = 0usize;
        for function in self.functions.values() {
            let mut bytes = 0;
            // SAFETY: the number outlives the call, and the function belongs to the loaded module.
            unsafe { sys::cuFuncGetAttribute(&raw mut bytes, attribute, function.handle).result()? };
            most = most.max(usize::try_from(bytes).unwrap_or(0));
        }
        let (limit, mut now) = (CUlimit::CU_LIMIT_STACK_SIZE, 0);
        // SAFETY: the number outlives the call; the context is bound.
        unsafe { sys::cuCtxGetLimit(&raw mut now, limit).result()? };
        if most > now {
            // SAFETY: the context is bound.
            unsafe { sys::cuCtxSetLimit(limit, most).result()? };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_blocks_of_all_ranks_fill_a_quarter_of_the_slots_at_most() {
        // An H100's multiprocessors, with as many blocks per multiprocessor as registers allow.
        for (resident, threads) in [(1, 512), (2, 512), (4, 512), (2, 256), (8, 256)] {
            let slots = 132 * resident;
            for ranks in 1..=MAX_LOCAL as u32 {
                let blocks = blocks_of_a_rank(slots, ranks, threads) * (COLLECTIVE_THREADS / threads) * ranks;
                assert!(blocks > 0 && 4 * blocks <= slots, "{ranks} ranks have {blocks} blocks in {slots} slots");
            }
        }
        assert_eq!(blocks_of_a_rank(132, 8, 256), 2);
        assert_eq!(blocks_of_a_rank(16, 8, 512), 0, "too small a GPU");
    }
}
