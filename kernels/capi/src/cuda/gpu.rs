//! Launches this build's kernels on a GPU.

use std::ffi::c_void;

use semmoe_kernels_cuda::driver::{CallerContext, Device, DeviceError, memory::HostWords};
use semmoe_kernels_cuda::{GpuError, Launch, Target, embedded};

use super::{Cuda, Launcher, Opened};
use crate::abi::InitArgs;
use crate::backend::{Backend, Facts};
use crate::failure::{Code, Failure};

/// A GPU and the word to which its kernels report.
struct Gpu {
    word: HostWords,
    device: Device,
    /// Set only while this value is dropped: as the last field, it restores the caller's context after the others are
    /// dropped.
    caller: Option<CallerContext>,
}

// SAFETY: any thread that binds the GPU, as every method does, may use and free word and device; `caller` is set only
// by the dropping thread.
unsafe impl Send for Gpu {}

/// Checks that this build contains kernels.
pub(crate) fn built() -> Result<(), Failure> {
    embedded(Target::Sm90).map(|_| ()).ok_or_else(|| DeviceError::NoKernels.into())
}

/// Opens the GPU, loads the kernels, and allocates the report word, which is the only allocation.
///
/// # Safety
/// Buffers and signals must meet the header's requirements.
pub(crate) unsafe fn open(args: &InitArgs, facts: &Facts) -> Result<Box<dyn Backend>, Failure> {
    built()?;
    let ordinal = usize::try_from(args.ordinal)
        .map_err(|_| Failure::new(Code::OutOfRange, format!("ordinal is {}, expected 0 or more", args.ordinal)))?;
    let _caller = CallerContext::keep()?;
    let device = Device::open(ordinal)?;
    let word = HostWords::new(1)?;
    let (blocks, report) = (super::blocks_for(device.processors, facts.world), word.buffers()[0]);
    let launcher = Box::new(Gpu { word, device, caller: None });
    // SAFETY: upheld by the caller.
    Ok(Box::new(unsafe { Cuda::new(args, facts, Opened { launcher, report, blocks }) }?))
}

impl Launcher for Gpu {
    fn launch(&mut self, launches: &[Launch], stream: *mut c_void) -> Result<(), GpuError> {
        let _caller = self.device.enter()?;
        launches.iter().try_for_each(|launch| self.device.check(launch))?;
        // SAFETY: the caller of the C interface guarantees that stream and memory are valid.
        launches.iter().try_for_each(|launch| unsafe { self.device.launch(launch, stream.cast()) })?;
        Ok(())
    }

    fn report(&self) -> u64 {
        self.word.read(0)
    }

    fn has_multicast(&self) -> bool {
        self.device.multicast
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.caller = self.device.enter().ok();
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Launch(error) => error.into(),
            DeviceError::NoKernels => Self::new(Code::NotBuilt, error.to_string()),
            _ => Self::new(Code::Device, error.to_string()),
        }
    }
}
