//! NCCL as [`Wire`], and the GPU as [`Runner`], for ranks on several hosts. Not yet run on a GPU.

use std::ffi::{c_char, c_void};

use cudarc::nccl::{result, sys};
use semmoe_kernels::Dtype;

use super::{Device, DeviceError};
use crate::hosts::{Kind, Runner, Span, Wire};
use crate::launch::Launch;

/// What rank 0 makes and every other rank must be told.
pub type GroupId = [u8; 128];

/// One rank of a group over NCCL.
pub struct Group {
    comm: sys::ncclComm_t,
    rank: usize,
    ranks: usize,
}

// SAFETY: a communicator may be used from any thread, one at a time; methods take `&mut self`.
unsafe impl Send for Group {}

/// Makes the id of a new group.
///
/// # Errors
/// No NCCL on the loader's path, or one that refuses.
pub fn new_group_id() -> Result<GroupId, DeviceError> {
    find()?;
    let id = result::get_uniqueid().map_err(|error| DeviceError::Nccl(error.0 as u32))?;
    Ok(id.internal.map(|byte| byte as u8))
}

fn find() -> Result<(), DeviceError> {
    // SAFETY: only looks for the library; without it cudarc would panic.
    if unsafe { sys::is_culib_present() } { Ok(()) } else { Err(DeviceError::NoNccl) }
}

impl Group {
    /// Joins; waits until all ranks did. The GPU of this rank must be bound.
    ///
    /// # Errors
    /// No NCCL, a rank past the group, an NCCL that refuses.
    pub fn join(id: &GroupId, rank: usize, ranks: usize) -> Result<Self, DeviceError> {
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
        Ok(Self { comm, rank, ranks })
    }
}

fn said(answer: Result<result::NcclStatus, result::NcclError>) -> Result<(), String> {
    answer.map(|_| ()).map_err(|error| format!("status {}", error.0 as u32))
}

fn kind(kind: Kind) -> sys::ncclDataType_t {
    match kind {
        Kind::Element(Dtype::F32) | Kind::Float32 => sys::ncclDataType_t::ncclFloat32,
        Kind::Element(Dtype::F16) => sys::ncclDataType_t::ncclFloat16,
        Kind::Element(Dtype::Bf16) => sys::ncclDataType_t::ncclBfloat16,
        Kind::Int32 => sys::ncclDataType_t::ncclInt32,
    }
}

fn count(span: Span) -> Result<usize, String> {
    usize::try_from(span.count).map_err(|_| format!("{} elements are too many", span.count))
}

impl Wire for Group {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn group_start(&mut self) -> Result<(), String> {
        said(result::group_start())
    }

    fn group_end(&mut self) -> Result<(), String> {
        said(result::group_end())
    }

    unsafe fn send(&mut self, from: Span, peer: usize, stream: *mut c_void) -> Result<(), String> {
        let address = from.address as *const c_void;
        // SAFETY: the caller's promise.
        said(unsafe { result::send(address, count(from)?, kind(from.kind), peer as i32, self.comm, stream.cast()) })
    }

    unsafe fn receive(&mut self, to: Span, peer: usize, stream: *mut c_void) -> Result<(), String> {
        let address = to.address as *mut c_void;
        // SAFETY: the caller's promise.
        said(unsafe { result::recv(address, count(to)?, kind(to.kind), peer as i32, self.comm, stream.cast()) })
    }

    unsafe fn reduce(&mut self, from: Span, to: u64, root: usize, stream: *mut c_void) -> Result<(), String> {
        let (read, written, sum) = (from.address as *const c_void, to as *mut c_void, sys::ncclRedOp_t::ncclSum);
        let (count, kind) = (count(from)?, kind(from.kind));
        // SAFETY: the caller's promise.
        said(unsafe { result::reduce(read, written, count, kind, sum, root as i32, self.comm, stream.cast()) })
    }

    unsafe fn broadcast(&mut self, from: u64, to: Span, root: usize, stream: *mut c_void) -> Result<(), String> {
        let (read, written) = (from as *const c_void, to.address as *mut c_void);
        // SAFETY: the caller's promise.
        said(unsafe {
            result::broadcast(read, written, count(to)?, kind(to.kind), root as i32, self.comm, stream.cast())
        })
    }
}

impl Runner for Device {
    unsafe fn launch(&self, launch: &Launch, stream: *mut c_void) -> Result<(), String> {
        // SAFETY: the caller's promise.
        unsafe { Device::launch(self, launch, stream.cast()) }.map_err(|error| error.to_string())
    }

    fn blocks(&self) -> u32 {
        self.processors()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // SAFETY: made in `join`, ended once.
        let _ = unsafe { result::comm_abort(self.comm) };
    }
}
