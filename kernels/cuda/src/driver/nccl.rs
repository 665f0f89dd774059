//! [`Wire`] over NCCL, for ranks on several hosts. Not yet tested on a GPU.

use std::ffi::{c_char, c_void};

use cudarc::nccl::{result, sys};
use semmoe_kernels::Dtype;

use super::DeviceError;
use crate::error::GpuError;
use crate::hosts::{Transfer, Wire};

/// The group's id, which rank 0 creates and every other rank needs.
pub type GroupId = [u8; 128];

/// One rank of an NCCL group.
pub struct Group {
    comm: sys::ncclComm_t,
    stream: sys::cudaStream_t,
    rank: usize,
    ranks: usize,
}

// SAFETY: a communicator may be used by any thread, one at a time; methods take `&mut self`.
unsafe impl Send for Group {}

/// Creates the id of a new group.
///
/// # Errors
/// If NCCL is not on the loader's path, or refuses the call.
pub fn new_group_id() -> Result<GroupId, DeviceError> {
    find()?;
    let id = result::get_uniqueid().map_err(|error| DeviceError::Nccl(error.0 as u32))?;
    Ok(id.internal.map(|byte| byte as u8))
}

fn find() -> Result<(), DeviceError> {
    // SAFETY: this only searches for the library; without it, cudarc would panic.
    if unsafe { sys::is_culib_present() } { Ok(()) } else { Err(DeviceError::NoNccl) }
}

impl Group {
    /// Joins the group and waits until all ranks have joined. This rank's GPU must be bound.
    ///
    /// # Errors
    /// If NCCL is missing or refuses the call, or the rank is out of range.
    ///
    /// # Safety
    /// `stream` must belong to that GPU for as long as the value lives.
    pub unsafe fn join(id: &GroupId, rank: usize, ranks: usize, stream: *mut c_void) -> Result<Self, DeviceError> {
        find()?;
        let fit = |number: usize| i32::try_from(number).map_err(|_| DeviceError::Group { rank, ranks });
        if rank >= ranks {
            return Err(DeviceError::Group { rank, ranks });
        }
        let id = sys::ncclUniqueId { internal: id.map(|byte| byte as c_char) };
        let mut comm = std::ptr::null_mut();
        // SAFETY: the pointer outlives the call.
        unsafe { result::comm_init_rank(&raw mut comm, fit(ranks)?, id, fit(rank)?) }
            .map_err(|error| DeviceError::Nccl(error.0 as u32))?;
        Ok(Self { comm, stream: stream.cast(), rank, ranks })
    }

    /// # Safety
    /// See [`Wire::group`].
    unsafe fn call(&self, call: &Transfer) -> Result<(), GpuError> {
        let (Transfer::Send { from: span, peer }
        | Transfer::Receive { to: span, peer }
        | Transfer::Broadcast { to: span, root: peer, .. }) = *call;
        let count = usize::try_from(span.count).map_err(|_| format!("{} elements are too many", span.count))?;
        let (memory, kind, peer) = (span.address as *mut c_void, kind(span.dtype), peer as i32);
        // SAFETY: upheld by the caller.
        let answer = unsafe {
            match call {
                Transfer::Send { .. } => result::send(memory, count, kind, peer, self.comm, self.stream),
                Transfer::Receive { .. } => result::recv(memory, count, kind, peer, self.comm, self.stream),
                Transfer::Broadcast { from, .. } => {
                    result::broadcast(*from as *const c_void, memory, count, kind, peer, self.comm, self.stream)
                }
            }
        };
        said(answer)
    }
}

fn kind(dtype: Dtype) -> sys::ncclDataType_t {
    match dtype {
        Dtype::F32 => sys::ncclDataType_t::ncclFloat32,
        Dtype::F16 => sys::ncclDataType_t::ncclFloat16,
        Dtype::Bf16 => sys::ncclDataType_t::ncclBfloat16,
    }
}

fn said(answer: Result<result::NcclStatus, result::NcclError>) -> Result<(), GpuError> {
    answer.map(|_| ()).map_err(|error| format!("status {}", error.0 as u32).into())
}

impl Wire for Group {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    unsafe fn group(&mut self, calls: &[Transfer]) -> Result<(), GpuError> {
        said(result::group_start())?;
        // SAFETY: upheld by the caller.
        let made = calls.iter().try_for_each(|call| unsafe { self.call(call) });
        // A group call must be ended even if one of its calls failed.
        made.and(said(result::group_end()))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // SAFETY: created in `join`, aborted once.
        let _ = unsafe { result::comm_abort(self.comm) };
    }
}
