//! Launches on a GPU, with the kernels of this build.

use std::ffi::c_void;

use semmoe_kernels_cuda::driver::{CallerContext, Device, DeviceError, memory::HostWords};
use semmoe_kernels_cuda::{Launch, Target, embedded};

use super::{Cuda, Launcher, Opened};
use crate::abi::InitArgs;
use crate::backend::{Backend, Facts};
use crate::failure::{Code, Failure};

/// A GPU and the word that its kernels report to.
struct Gpu {
    word: HostWords,
    device: Device,
    /// Only while this is dropped: the last field, so that the caller has its context back when the others are gone.
    caller: Option<CallerContext>,
}

// SAFETY: word and device may be used and freed by any thread that binds the GPU, as every method does; `caller` is set
// only by the thread that drops it.
unsafe impl Send for Gpu {}

/// Whether this build has kernels.
pub(crate) fn built() -> Result<(), Failure> {
    embedded(Target::Sm90).map(|_| ()).ok_or_else(|| DeviceError::NoKernels.into())
}

/// Opens the GPU, loads the kernels and allocates the report word: all that is ever allocated.
///
/// # Safety
/// Buffers and signals are what the header asks for.
pub(crate) unsafe fn open(args: &InitArgs, facts: &Facts) -> Result<Box<dyn Backend>, Failure> {
    built()?;
    let ordinal = usize::try_from(args.ordinal)
        .map_err(|_| Failure::new(Code::OutOfRange, format!("ordinal is {}, expected 0 or more", args.ordinal)))?;
    let _caller = CallerContext::keep()?;
    let device = Device::open(ordinal)?;
    let word = HostWords::new(1)?;
    let (blocks, report) = (super::blocks_for(device.processors, facts.world), word.buffers()[0]);
    let launcher = Box::new(Gpu { word, device, caller: None });
    // SAFETY: the caller's promise.
    Ok(Box::new(unsafe { Cuda::new(args, facts, Opened { launcher, report, blocks }) }?))
}

impl Launcher for Gpu {
    fn launch(&mut self, launches: &[Launch], stream: *mut c_void) -> Result<(), String> {
        let all = || {
            let _caller = self.device.enter()?;
            launches.iter().try_for_each(|launch| self.device.check(launch))?;
            // SAFETY: stream and memory are the promise of the C interface's caller.
            launches.iter().try_for_each(|launch| unsafe { self.device.launch(launch, stream.cast()) })
        };
        all().map_err(|error: DeviceError| error.to_string())
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
