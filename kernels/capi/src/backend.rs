//! A device's operations, which take checked arguments.

use std::ffi::c_void;
use std::time::Duration;

use crate::abi::{
    AllReduce, Allgather, Argsort, Combine, DEVICE_CPU, DEVICE_CUDA, DispatchArgs, InitArgs, Multicast, ReduceScatter,
};
use crate::cpu::Cpu;
use crate::failure::{Code, Failure};

/// Properties of a communicator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    /// Address of this rank's symmetric buffer.
    pub(crate) buffer: usize,
    pub(crate) buffer_bytes: u64,
    pub(crate) max_tokens: u64,
    pub(crate) timeout: Duration,
}

/// A device's collectives. Arguments have passed [`crate::check`]: sizes, alignment, nulls, offsets in the symmetric
/// buffer. The caller guarantees that pointers are valid. Only error messages are allocated.
pub(crate) trait Collectives: Send {
    fn argsort(&mut self, facts: &Facts, args: &Argsort, stream: *mut c_void) -> Result<(), Failure>;
    fn reduce_scatter(&mut self, facts: &Facts, args: &ReduceScatter, stream: *mut c_void) -> Result<(), Failure>;
    fn allgather(&mut self, facts: &Facts, args: &Allgather, stream: *mut c_void) -> Result<(), Failure>;
    fn all_reduce(&mut self, facts: &Facts, args: &AllReduce, stream: *mut c_void) -> Result<(), Failure>;
    fn dispatch(&mut self, facts: &Facts, args: &DispatchArgs, stream: *mut c_void) -> Result<(), Failure>;
    fn combine(&mut self, facts: &Facts, args: &Combine, stream: *mut c_void) -> Result<(), Failure>;
}

/// A device: its collectives, and the state that it keeps between calls.
pub(crate) trait Backend: Collectives {
    /// Whether [`multicast`](Self::multicast) is available.
    fn has_multicast(&self) -> bool {
        false
    }
    /// Routes calls through the NVLink switch from now on.
    fn multicast(&mut self, _args: &Multicast) -> Result<(), Failure> {
        Err(Failure::new(Code::Device, "this device has no multicast support"))
    }
    /// Reports the device's asynchronous errors.
    fn check(&mut self) -> Result<(), Failure>;
}

/// Opens the device selected by checked arguments.
///
/// # Safety
/// Buffers and signals must meet the header's requirements.
pub(crate) unsafe fn open(args: &InitArgs, facts: &Facts) -> Result<Box<dyn Backend>, Failure> {
    match args.device {
        // SAFETY: upheld by the caller.
        DEVICE_CPU => Ok(Box::new(unsafe { Cpu::join(args, facts) }?)),
        #[cfg(feature = "launcher")]
        // SAFETY: upheld by the caller.
        DEVICE_CUDA => unsafe { crate::plug::open(args, facts) },
        #[cfg(not(feature = "launcher"))]
        DEVICE_CUDA => Err(not_built()),
        other => Err(unknown(other)),
    }
}

/// Returns the size of one rank's signals.
pub(crate) fn signal_bytes(device: u32) -> Result<u64, Failure> {
    match device {
        DEVICE_CPU => Ok(semmoe_ranks::SIGNAL_BYTES as u64),
        #[cfg(feature = "launcher")]
        DEVICE_CUDA => crate::plug::built().map(|()| semmoe_kernels_cuda::SIGNAL_BYTES),
        #[cfg(not(feature = "launcher"))]
        DEVICE_CUDA => Err(not_built()),
        other => Err(unknown(other)),
    }
}

/// Whether CUDA kernels are built in and a driver is present.
pub(crate) fn has_cuda() -> bool {
    #[cfg(feature = "launcher")]
    let found = crate::plug::available();
    #[cfg(not(feature = "launcher"))]
    let found = false;
    found
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn not_built() -> Failure {
    let message =
        "this library was built without CUDA: rebuild it with the feature `cuda` and with SEMMOE_KERNEL_IMAGES set";
    Failure::new(Code::NotBuilt, message)
}

fn unknown(device: u32) -> Failure {
    Failure::invalid(format!("device is {device}, expected {DEVICE_CPU} (CPU) or {DEVICE_CUDA} (CUDA)"))
}
